/* Torch's functions and what they need to know. Built without torch's headers: its stable C functions
   are handed over by address (`bind`), so one build serves every version. */
#ifndef CUBEGRAD_TORCH_H
#define CUBEGRAD_TORCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "step.h"

/* A handle points at a torch tensor, which is itself one pointer: the number in `_cdata`. */
typedef void **handle;

/* In the order of FUNCTIONS in tensors.py. The first nine are torch's stable C functions, which turn
   exceptions into a status. The next four are C++ functions that throw nothing when they are given
   a defined tensor that is not an inference tensor. */
struct torch {
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
};

extern struct torch torch;
extern PyObject *tensor_class, *name_cdata;
extern void *undefined; /* what `grad` points at where there is none */
extern int strided;     /* torch's number for the ordinary layout */
extern int offset;      /* of `_cdata` in a tensor's object, or 0: ask for the attribute, 75 ns */

extern PyMethodDef TORCH_METHODS[], TENSOR_METHODS[];

/* 0, or -1 with an exception. */
int init_torch(void);

/* NULL where torch has none, or after a fork. */
parallel_function *torch_parallel_loop(void);

static inline void *implementation_of(PyObject *tensor)
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

#endif
