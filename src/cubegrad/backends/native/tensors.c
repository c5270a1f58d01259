/* What a repeated step relies on, read from tensors and compared with what it was. */
#include "torch.h"

#include <string.h>

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

static int record_state(PyObject *tensor, struct record *record)
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
static int record_param(PyObject *param, struct record *record, int64_t *address)
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
static PyObject *inspect(PyObject *params, PyObject *state, PyObject *known)
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
        fine = record_param(PyList_GetItem(params, i), &record, &addresses[i]);
    for (Py_ssize_t i = 0; i < others && fine == 1; i++)
        fine = record_state(PyList_GetItem(state, i), &record);
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
    return inspect(params, state, NULL);
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
    return inspect(params, state, known);
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

PyDoc_STRVAR(same_objects_doc,
             "same_objects(a, b) -> bool\n\nWhether two lists hold the very same objects.");

static PyObject *same_objects(PyObject *self, PyObject *args)
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

PyMethodDef TENSOR_METHODS[] = {
    {"signature", signature, METH_VARARGS, signature_doc},
    {"addresses", addresses, METH_VARARGS, addresses_doc},
    {"bump_versions", bump_versions, METH_VARARGS, bump_doc},
    {"same_objects", same_objects, METH_VARARGS, same_objects_doc},
    {NULL, NULL, 0, NULL},
};
