/* Python's door to cpu.c, and a quick look at the tensors that a step will touch. Built against
   Python's limited interface and without torch's headers: torch's stable C functions are handed
   over by address (`bind`), so one build serves every version of both. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <string.h>

#include "cpu.h"

/* A handle points at a torch tensor, which is itself one pointer: the number in `_cdata`. */
typedef void **handle;

static struct {
    int32_t (*data)(handle, void **);
    int32_t (*dtype)(handle, int32_t *);
    int32_t (*layout)(handle, int32_t *);
    int32_t (*dim)(handle, int64_t *);
    int32_t (*sizes)(handle, int64_t **);
    int32_t (*strides)(handle, int64_t **);
    parallel_function *parallel;
} torch;

static PyObject *tensor_class, *name_grad, *name_cdata;
static int strided; /* torch's number for the ordinary layout */
static int offset;  /* of `_cdata` in a tensor's object, or 0: ask for the attribute, 75 ns */
static int forked; /* torch's threads stay behind in the parent */

static void note_fork(void) { forked = 1; }

static void *address_of(PyObject *number)
{
    return number == Py_None ? NULL : PyLong_AsVoidPtr(number);
}

static PyObject *bind(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *class, *at[7];
    void *found[7];
    int layout, place;
    if (!PyArg_ParseTuple(args, "Oii(OOOOOOO)", &class, &place, &layout, &at[0], &at[1], &at[2],
                          &at[3], &at[4], &at[5], &at[6]))
        return NULL;
    for (int i = 0; i < 7; i++) {
        found[i] = address_of(at[i]);
        if (PyErr_Occurred())
            return NULL;
    }
    memcpy(&torch, found, sizeof torch);
    strided = layout;
    offset = place;
    Py_INCREF(class);
    Py_XDECREF(tensor_class);
    tensor_class = class;
    Py_RETURN_NONE;
}

static void *implementation_of(PyObject *tensor)
{
    if (offset)
        return *(void **)((char *)tensor + offset);
    PyObject *number = PyObject_GetAttr(tensor, name_cdata);
    if (number == NULL)
        return NULL;
    void *implementation = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return implementation;
}

struct facts {
    void *data;
    int32_t dtype;
    int64_t dim, *sizes, *strides;
};

/* 1, 0 for a tensor that this way of looking does not suit, -1 with an exception. */
static int read_facts(PyObject *tensor, struct facts *facts)
{
    if (!PyType_IsSubtype(Py_TYPE(tensor), (PyTypeObject *)tensor_class)) {
        PyErr_SetString(PyExc_TypeError, "parameters must be tensors");
        return -1;
    }
    void *implementation = implementation_of(tensor);
    if (implementation == NULL)
        return PyErr_Occurred() ? -1 : 0;
    handle at = &implementation;
    int32_t layout;
    if (torch.layout(at, &layout) || layout != strided)
        return 0; /* before asking for an address, which a sparse tensor refuses with a message */
    return !torch.dtype(at, &facts->dtype) && !torch.dim(at, &facts->dim) &&
           !torch.sizes(at, &facts->sizes) && !torch.strides(at, &facts->strides) &&
           !torch.data(at, &facts->data);
}

/* A growing row of numbers, or the comparison with one that was written before. */
struct record {
    int64_t *words;
    Py_ssize_t length, capacity;
    int comparing;
};

static int put(struct record *record, const int64_t *words, Py_ssize_t count)
{
    if (record->length + count > record->capacity) {
        if (record->comparing)
            return 0;
        Py_ssize_t capacity = 2 * (record->length + count) + 64;
        int64_t *grown = PyMem_Realloc(record->words, (size_t)capacity * sizeof *grown);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        record->words = grown;
        record->capacity = capacity;
    }
    int64_t *at = record->words + record->length;
    record->length += count;
    if (record->comparing)
        return memcmp(at, words, (size_t)count * sizeof *words) == 0;
    memcpy(at, words, (size_t)count * sizeof *words);
    return 1;
}

/* Put down all about a parameter and its gradient but the gradient's address, which is returned
   through `address`. 1, 0 if something differs or does not suit, -1 with an exception. */
static int look_at(PyObject *param, struct record *record, int64_t *address)
{
    struct facts p, g;
    int fine = read_facts(param, &p);
    if (fine != 1)
        return fine;
    PyObject *grad = PyObject_GetAttr(param, name_grad);
    if (grad == NULL)
        return -1;
    fine = (PyObject *)Py_TYPE(grad) == tensor_class ? read_facts(grad, &g) : 0;
    /* The parameter keeps the gradient alive, and with it what g points at. */
    Py_DECREF(grad);
    if (fine != 1)
        return fine;
    size_t bytes = (size_t)p.dim * sizeof(int64_t);
    if (g.dim != p.dim || memcmp(g.sizes, p.sizes, bytes) != 0)
        return 0;
    *address = (int64_t)(intptr_t)g.data;
    int64_t head[] = {(int64_t)(intptr_t)p.data, p.dtype, g.dtype, p.dim};
    if ((fine = put(record, head, 4)) != 1 || (fine = put(record, p.sizes, p.dim)) != 1 ||
        (fine = put(record, p.strides, p.dim)) != 1)
        return fine;
    return put(record, g.strides, g.dim);
}

static PyObject *finished(struct record *record, PyObject *addresses)
{
    if (record->comparing)
        return addresses;
    Py_DECREF(addresses);
    return PyBytes_FromStringAndSize((const char *)record->words,
                                     record->length * (Py_ssize_t)sizeof *record->words);
}

/* The signature of the parameters if `known` is NULL, else the addresses of their gradients. */
static PyObject *look(PyObject *params, PyObject *known)
{
    if (torch.data == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "torch's functions have not been bound");
        return NULL;
    }
    struct record record = {NULL, 0, 0, known != NULL};
    if (record.comparing) {
        char *bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(known, &bytes, &length) < 0)
            return NULL;
        record.words = (int64_t *)bytes; /* only read */
        record.capacity = length / (Py_ssize_t)sizeof(int64_t);
    }
    Py_ssize_t count = PyList_Size(params);
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (result == NULL)
        return NULL;
    int64_t *addresses = (int64_t *)PyBytes_AsString(result);
    int fine = 1;
    for (Py_ssize_t i = 0; i < count && fine == 1; i++) {
        PyObject *param = PyList_GetItem(params, i);
        fine = param == NULL ? -1 : look_at(param, &record, &addresses[i]);
    }
    if (record.comparing && record.length != record.capacity && fine == 1)
        fine = 0;
    if (fine == 1) {
        result = finished(&record, result);
    } else {
        Py_DECREF(result);
        result = fine < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (!record.comparing)
        PyMem_Free(record.words);
    return result;
}

PyDoc_STRVAR(signature_doc,
             "signature(params) -> bytes | None\n\n"
             "All that a prepared step relies on: where the parameters lie, and the dtypes, sizes\n"
             "and strides of them and their gradients. None if a gradient is missing or is not a\n"
             "plain strided tensor.");

static PyObject *signature(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *params;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &params))
        return NULL;
    return look(params, NULL);
}

PyDoc_STRVAR(addresses_doc,
             "addresses(params, signature) -> bytes | None\n\n"
             "Where the gradients lie, if everything else is as the signature has it; else None.");

static PyObject *addresses(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *params, *known;
    if (!PyArg_ParseTuple(args, "O!S", &PyList_Type, &params, &known))
        return NULL;
    return look(params, known);
}

PyDoc_STRVAR(same_doc, "same(a, b) -> bool\n\nWhether two lists hold the very same objects.");

static PyObject *same(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *a, *b;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &a, &PyList_Type, &b))
        return NULL;
    Py_ssize_t count = PyList_Size(a);
    int equal = count == PyList_Size(b);
    for (Py_ssize_t i = 0; i < count && equal; i++)
        equal = PyList_GetItem(a, i) == PyList_GetItem(b, i);
    return PyBool_FromLong(equal);
}

PyDoc_STRVAR(step_doc,
             "step(rows, starts, grads, numbers, method, param, grad, state, level, threads,\n"
             "     sums)\n\n"
             "One step over all rows, as cpu.h lays them out. `sums` is the address of three\n"
             "doubles, to which those of rule.sums are added, or 0. Who calls answers for the\n"
             "addresses; the sizes of the tables are checked here.");

static PyObject *step(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer rows, starts, grads, numbers;
    int method, param, grad, state, level, threads, result = 0;
    unsigned long long sums;
    if (!PyArg_ParseTuple(args, "y*y*y*y*iiiiiiK", &rows, &starts, &grads, &numbers, &method,
                          &param, &grad, &state, &level, &threads, &sums))
        return NULL;
    int64_t count = grads.len / (int64_t)sizeof(void *);
    int sound = count > 0 && rows.len == count * (int64_t)sizeof(struct row) &&
                starts.len == (count + 1) * (int64_t)sizeof(int64_t) &&
                numbers.len == sizeof(struct numbers) && (unsigned)method <= MIRROR_MADGRAD &&
                (unsigned)param <= DOUBLE && (unsigned)grad <= DOUBLE &&
                (state == SINGLE || state == DOUBLE) && (param == state || param < SINGLE) &&
                level >= 0 && level <= (int)best_level() && (sums == 0 || method == MADGRAD);
    if (sound) {
        struct job job = {rows.buf, starts.buf, grads.buf, count, .method = method,
                          .param = param, .grad = grad, .state = state, .level = level,
                          .sums = (double *)(uintptr_t)sums};
        memcpy(&job.numbers, numbers.buf, sizeof job.numbers);
        PyThreadState *saved = PyEval_SaveThread();
        result = run_job(&job, forked ? NULL : torch.parallel, threads);
        PyEval_RestoreThread(saved);
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&grads);
    PyBuffer_Release(&numbers);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "step: the tables do not fit each other");
        return NULL;
    }
    if (result != 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(cbrt_doc, "cbrt(from, to, kind, level)\n\nThe cube roots that a step takes.");

static PyObject *cbrt_of(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer from, to;
    int kind, level;
    if (!PyArg_ParseTuple(args, "y*w*ii", &from, &to, &kind, &level))
        return NULL;
    int sound = from.len == to.len && (kind == SINGLE || kind == DOUBLE) && level >= 0 &&
                level <= (int)best_level();
    if (sound)
        cube_roots(from.buf, to.buf, from.len / (kind == SINGLE ? 4 : 8), kind, level);
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "cbrt: the buffers, the kind or the level do not fit");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef METHODS[] = {
    {"bind", bind, METH_VARARGS, NULL},
    {"signature", signature, METH_VARARGS, signature_doc},
    {"addresses", addresses, METH_VARARGS, addresses_doc},
    {"same", same, METH_VARARGS, same_doc},
    {"step", step, METH_VARARGS, step_doc},
    {"cbrt", cbrt_of, METH_VARARGS, cbrt_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = METHODS};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&MODULE);
    if (module == NULL)
        return NULL;
    name_grad = PyUnicode_InternFromString("grad");
    name_cdata = PyUnicode_InternFromString("_cdata");
    if (name_grad == NULL || name_cdata == NULL ||
        PyModule_AddIntConstant(module, "BEST_LEVEL", (long)best_level()) < 0 ||
        pthread_atfork(NULL, NULL, note_fork) != 0) {
        Py_DECREF(module);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return module;
}
