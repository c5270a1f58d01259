#include "torch.h"

#include <pthread.h>
#include <string.h>

#define FUNCTIONS (sizeof torch / sizeof(void *))

struct torch torch;
PyObject *tensor_class, *name_cdata;
void *undefined;
int strided, offset;
static int forked; /* a child process has none of torch's threads */

static void note_fork(void) { forked = 1; }

parallel_function *torch_parallel_loop(void) { return forked ? NULL : torch.parallel; }

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

PyMethodDef TORCH_METHODS[] = {
    {"bind", bind, METH_VARARGS, bind_doc},
    {NULL, NULL, 0, NULL},
};

int init_torch(void)
{
    name_cdata = PyUnicode_InternFromString("_cdata");
    if (name_cdata != NULL && pthread_atfork(NULL, NULL, note_fork) == 0)
        return 0;
    if (!PyErr_Occurred())
        PyErr_NoMemory();
    return -1;
}
