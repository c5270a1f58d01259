/* Python's door to step.c, and a quick look at the tensors that a step will touch. Built against
   Python's limited interface and without torch's headers: torch's stable C functions are handed
   over by address (`bind`), so one build serves every version of both. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <string.h>

#include "step.h"

/* A handle points at a torch tensor, which is itself one pointer: the number in `_cdata`. */
typedef void **handle;

/* In the order of FUNCTIONS in look.py. The first nine are torch's stable C functions, which turn
   exceptions into a status. The next four are C++ functions that throw nothing when they are given
   a defined tensor that is not an inference tensor. */
static struct {
    int32_t (*data)(handle, void **);
    int32_t (*dtype)(handle, int32_t *);
    int32_t (*layout)(handle, int32_t *);
    int32_t (*dim)(handle, int64_t *);
    int32_t (*sizes)(handle, int64_t **);
    int32_t (*strides)(handle, int64_t **);
    int32_t (*storage_size)(handle, int64_t *);
    int32_t (*storage_offset)(handle, int64_t *);
    size_t (*element_size)(int32_t);
    handle (*grad)(void *);
    _Bool (*is_neg)(handle);
    _Bool (*has_dispatch)(handle); /* of a subclass with __torch_dispatch__ */
    void (*bump_version)(handle);
    parallel_function *parallel;
} torch;

#define FUNCTIONS (sizeof torch / sizeof(void *))

static PyObject *tensor_class, *name_cdata;
static void *undefined; /* what `grad` points at where there is none */
static int strided;     /* torch's number for the ordinary layout */
static int offset;      /* of `_cdata` in a tensor's object, or 0: ask for the attribute, 75 ns */
static int forked;      /* torch's threads stay behind in the parent */

static void note_fork(void) { forked = 1; }

static void *implementation_of(PyObject *tensor)
{
    if (!PyType_IsSubtype(Py_TYPE(tensor), (PyTypeObject *)tensor_class)) {
        PyErr_SetString(PyExc_TypeError, "parameters and state must be tensors");
        return NULL;
    }
    if (offset)
        return *(void **)((char *)tensor + offset);
    PyObject *number = PyObject_GetAttr(tensor, name_cdata);
    if (number == NULL)
        return NULL;
    void *implementation = PyLong_AsVoidPtr(number);
    Py_DECREF(number);
    return implementation;
}

PyDoc_STRVAR(bind_doc,
             "bind(Tensor, offset, strided, addresses, bare)\n\n"
             "Hand over torch's functions by address. `bare` is a tensor without a gradient.");

static PyObject *bind(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *class, *addresses, *bare;
    void *found[FUNCTIONS];
    int layout, place;
    if (!PyArg_ParseTuple(args, "OiiO!O", &class, &place, &layout, &PyTuple_Type, &addresses,
                          &bare))
        return NULL;
    if (PyTuple_Size(addresses) != (Py_ssize_t)FUNCTIONS) {
        PyErr_SetString(PyExc_ValueError, "bind: one address for each function is needed");
        return NULL;
    }
    for (size_t i = 0; i < FUNCTIONS; i++) {
        PyObject *number = PyTuple_GetItem(addresses, (Py_ssize_t)i);
        found[i] = number == Py_None ? NULL : PyLong_AsVoidPtr(number);
        if (PyErr_Occurred())
            return NULL;
    }
    strided = layout;
    offset = place;
    Py_INCREF(class);
    Py_XDECREF(tensor_class);
    tensor_class = class;
    void *implementation = implementation_of(bare);
    if (implementation == NULL)
        return NULL;
    memcpy(&torch, found, sizeof torch);
    undefined = *torch.grad(implementation);
    Py_RETURN_NONE;
}

struct facts {
    void *data;
    int32_t dtype;
    int64_t dim, bytes, *sizes, *strides; /* bytes: of the storage */
};

/* Whether torch answered every question. */
static int read_facts(handle tensor, struct facts *facts)
{
    return !torch.dtype(tensor, &facts->dtype) && !torch.dim(tensor, &facts->dim) &&
           !torch.sizes(tensor, &facts->sizes) && !torch.strides(tensor, &facts->strides) &&
           !torch.storage_size(tensor, &facts->bytes) && !torch.data(tensor, &facts->data);
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

static int put_facts(struct record *record, const struct facts *facts)
{
    int64_t head[] = {(int64_t)(intptr_t)facts->data, facts->bytes, facts->dtype, facts->dim};
    int fine;
    if ((fine = put(record, head, 4)) != 1 || (fine = put(record, facts->sizes, facts->dim)) != 1)
        return fine;
    return put(record, facts->strides, facts->dim);
}

/* Each of these returns 1, 0 if something differs or does not suit, -1 with an exception. */

static int look_at_state(PyObject *tensor, struct record *record)
{
    void *implementation = implementation_of(tensor);
    struct facts facts;
    if (implementation == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (torch.is_neg(&implementation) || !read_facts(&implementation, &facts))
        return 0;
    return put_facts(record, &facts);
}

/* Whether the gradient's storage, which may have been resized, holds all of its elements. They lie
   densely, as the record's strides say. */
static int lies_in_storage(handle grad, const struct facts *facts)
{
    int64_t offset, count = 1;
    for (int64_t i = 0; i < facts->dim; i++)
        count *= facts->sizes[i];
    if (count == 0)
        return 1;
    return facts->data != NULL && !torch.storage_offset(grad, &offset) &&
           (offset + count) * (int64_t)torch.element_size(facts->dtype) <= facts->bytes;
}

/* Everything about a parameter and its gradient goes into the record, except the gradient's
   address, which is returned through `address`. */
static int look_at_param(PyObject *param, struct record *record, int64_t *address)
{
    struct facts p, g;
    void *implementation = implementation_of(param);
    if (implementation == NULL)
        return PyErr_Occurred() ? -1 : 0;
    handle grad = torch.grad(implementation);
    int32_t layout;
    if (*grad == undefined || torch.has_dispatch(grad) || torch.is_neg(grad) ||
        torch.is_neg(&implementation))
        return 0;
    /* Before asking for an address, which a sparse tensor refuses with a message. */
    if (torch.layout(grad, &layout) || layout != strided)
        return 0;
    if (!read_facts(&implementation, &p) || !read_facts(grad, &g))
        return 0;
    size_t bytes = (size_t)p.dim * sizeof(int64_t);
    if (g.dim != p.dim || memcmp(g.sizes, p.sizes, bytes) != 0)
        return 0;
    if (!lies_in_storage(grad, &g))
        return 0;
    *address = (int64_t)(intptr_t)g.data;
    int64_t head[] = {(int64_t)(intptr_t)implementation, g.dtype};
    int fine;
    if ((fine = put(record, head, 2)) != 1 || (fine = put_facts(record, &p)) != 1)
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

static int is_bound(void)
{
    if (torch.data == NULL)
        PyErr_SetString(PyExc_RuntimeError, "torch's functions have not been bound");
    return torch.data != NULL;
}

/* The signature of the tensors if `known` is NULL, else the addresses of the gradients. */
static PyObject *look(PyObject *params, PyObject *state, PyObject *known)
{
    if (!is_bound())
        return NULL;
    struct record record = {NULL, 0, 0, known != NULL};
    if (record.comparing) {
        char *bytes;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(known, &bytes, &length) < 0)
            return NULL;
        record.words = (int64_t *)bytes; /* only read */
        record.capacity = length / (Py_ssize_t)sizeof(int64_t);
    }
    Py_ssize_t count = PyList_Size(params), others = PyList_Size(state);
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    if (result == NULL)
        return NULL;
    int64_t *addresses = (int64_t *)PyBytes_AsString(result);
    int fine = 1;
    for (Py_ssize_t i = 0; i < count && fine == 1; i++)
        fine = look_at_param(PyList_GetItem(params, i), &record, &addresses[i]);
    for (Py_ssize_t i = 0; i < others && fine == 1; i++)
        fine = look_at_state(PyList_GetItem(state, i), &record);
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
             "signature(params, state) -> bytes | None\n\n"
             "Everything that a prepared step relies on: the addresses of parameters and state,\n"
             "and the dtypes, sizes and strides of them and of the gradients. None if a gradient\n"
             "is missing, is negated, has another shape or is not a plain strided tensor.");

static PyObject *signature(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *params, *state;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &params, &PyList_Type, &state))
        return NULL;
    return look(params, state, NULL);
}

PyDoc_STRVAR(addresses_doc,
             "addresses(params, state, signature) -> bytes | None\n\n"
             "The gradients' addresses if everything else is as in the signature, else None.");

static PyObject *addresses(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *params, *state, *known;
    if (!PyArg_ParseTuple(args, "O!O!S", &PyList_Type, &params, &PyList_Type, &state, &known))
        return NULL;
    return look(params, state, known);
}

PyDoc_STRVAR(bump_doc,
             "bump_versions(params)\n\n"
             "Tell autograd that these tensors were written to. None may be an inference tensor.");

static PyObject *bump_versions(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *params;
    if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &params) || !is_bound())
        return NULL;
    Py_ssize_t count = PyList_Size(params);
    for (Py_ssize_t i = 0; i < count; i++) {
        void *implementation = implementation_of(PyList_GetItem(params, i));
        if (implementation == NULL)
            return NULL;
        torch.bump_version(&implementation);
    }
    Py_RETURN_NONE;
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

PyDoc_STRVAR(meets_doc,
             "meets(spans, lengths, grads) -> bool\n\n"
             "Whether any of the gradients, at these addresses and of these lengths in bytes,\n"
             "shares memory with the spans: sorted pairs of start and end that are apart.");

static PyObject *meets(PyObject *self, PyObject *args)
{
    (void)self;
    const int64_t *spans, *lengths, *grads;
    Py_ssize_t spans_size, lengths_size, grads_size;
    if (!PyArg_ParseTuple(args, "y#y#y#", &spans, &spans_size, &lengths, &lengths_size, &grads,
                          &grads_size))
        return NULL;
    if (grads_size != lengths_size) {
        PyErr_SetString(PyExc_ValueError, "meets: one length for each address is needed");
        return NULL;
    }
    Py_ssize_t count = spans_size / (Py_ssize_t)(2 * sizeof *spans);
    for (Py_ssize_t i = 0; i < grads_size / (Py_ssize_t)sizeof *grads; i++) {
        Py_ssize_t low = 0, high = count; /* the first span that ends behind the gradient's start */
        while (low < high) {
            Py_ssize_t middle = low + (high - low) / 2;
            if (spans[2 * middle + 1] > grads[i])
                high = middle;
            else
                low = middle + 1;
        }
        if (low < count && lengths[i] > 0 && spans[2 * low] < grads[i] + lengths[i])
            Py_RETURN_TRUE;
    }
    Py_RETURN_FALSE;
}

PyDoc_STRVAR(step_doc,
             "step(rows, starts, grads, numbers, method, param, grad, state, level, threads,\n"
             "     sums)\n\n"
             "One step over all rows, as step.h lays them out. `sums` is the address of three\n"
             "doubles, to which those of distance.step_sums are added, or 0. Who calls answers for the\n"
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
    {"bind", bind, METH_VARARGS, bind_doc},
    {"signature", signature, METH_VARARGS, signature_doc},
    {"addresses", addresses, METH_VARARGS, addresses_doc},
    {"bump_versions", bump_versions, METH_VARARGS, bump_doc},
    {"same", same, METH_VARARGS, same_doc},
    {"meets", meets, METH_VARARGS, meets_doc},
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
    name_cdata = PyUnicode_InternFromString("_cdata");
    if (name_cdata == NULL ||
        PyModule_AddIntConstant(module, "BEST_LEVEL", (long)best_level()) < 0 ||
        pthread_atfork(NULL, NULL, note_fork) != 0) {
        Py_DECREF(module);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return module;
}
