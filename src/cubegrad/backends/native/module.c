/* The module `_native`: Python's way into step.c and tensors.c. Built against Python's limited
   interface, so one build serves every version of it. */
#include "torch.h"

#include <string.h>

PyDoc_STRVAR(any_within_doc,
             "any_within(spans, lengths, grads) -> bool\n\n"
             "Whether any of the gradients, at these addresses and of these lengths in bytes,\n"
             "shares memory with the spans: sorted pairs of start and end that are apart.");

static PyObject *any_within(PyObject *self, PyObject *args)
{
    (void)self;
    const int64_t *spans, *lengths, *grads;
    Py_ssize_t spans_size, lengths_size, grads_size;
    if (!PyArg_ParseTuple(args, "y#y#y#", &spans, &spans_size, &lengths, &lengths_size, &grads,
                          &grads_size))
        return NULL;
    if (grads_size != lengths_size) {
        PyErr_SetString(PyExc_ValueError, "any_within: one length for each address is needed");
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
             "step(rows, starts, grads, numbers, rule, param, grad, state, at_random, level,\n"
             "     threads, sums)\n\n"
             "One step over all rows, as step.h lays them out. `sums` is the address of three\n"
             "doubles, to which those of distance.step_sums are added, or 0. Who calls answers for the\n"
             "addresses; the sizes of the tables are checked here.");

static PyObject *step(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer rows, starts, grads, numbers;
    int rule, param, grad, state, at_random, level, threads, result = 0;
    unsigned long long sums;
    if (!PyArg_ParseTuple(args, "y*y*y*y*iiiiiiiK", &rows, &starts, &grads, &numbers, &rule,
                          &param, &grad, &state, &at_random, &level, &threads, &sums))
        return NULL;
    int64_t count = grads.len / (int64_t)sizeof(void *);
    int64_t row_size = state == CODES ? sizeof(struct coded_row) : sizeof(struct row);
    int sound = count > 0 && rows.len == count * row_size &&
                starts.len == (count + 1) * (int64_t)sizeof(int64_t) &&
                numbers.len == sizeof(struct numbers) && (unsigned)rule < RULE_COUNT &&
                (unsigned)param <= DOUBLE && (unsigned)grad <= DOUBLE &&
                state >= SINGLE && state <= CODES &&
                (param == (state == CODES ? SINGLE : state) || param < SINGLE) &&
                (!at_random || (param < SINGLE && state == SINGLE)) &&
                level >= 0 && level <= (int)best_level() && (sums == 0 || RULES[rule].pulls || RULES[rule].anchored);
    if (sound) {
        struct job job = {rows.buf, rows.buf, starts.buf, grads.buf, count, .rule = rule,
                          .param = param, .grad = grad, .state = state, .at_random = at_random,
                          .level = level, .sums = (double *)(uintptr_t)sums};
        memcpy(&job.numbers, numbers.buf, sizeof job.numbers);
        PyThreadState *saved = PyEval_SaveThread();
        result = run_job(&job, torch_parallel_loop(), threads);
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
    {"any_within", any_within, METH_VARARGS, any_within_doc},
    {"step", step, METH_VARARGS, step_doc},
    {"cbrt", cbrt_of, METH_VARARGS, cbrt_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = METHODS};

/* A tuple of the fields of each rule. */
static PyObject *rules(void)
{
    PyObject *all = PyTuple_New(RULE_COUNT);
    for (Py_ssize_t i = 0; all != NULL && i < RULE_COUNT; i++) {
        const struct rule *rule = &RULES[i];
        PyObject *fields =
            Py_BuildValue("(iiiiiiii)", rule->root, rule->growth_root, (int)rule->squares,
                          rule->pulls, rule->holds, rule->relative, rule->averages,
                          rule->anchored);
        if (fields == NULL || PyTuple_SetItem(all, i, fields) < 0)
            Py_CLEAR(all);
    }
    return all;
}

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&MODULE);
    if (module == NULL)
        return NULL;
    if (init_torch() < 0 || PyModule_AddFunctions(module, TORCH_METHODS) < 0 ||
        PyModule_AddFunctions(module, TENSOR_METHODS) < 0 ||
        PyModule_AddIntConstant(module, "BEST_LEVEL", (long)best_level()) < 0 ||
        PyModule_AddObject(module, "RULES", rules()) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
