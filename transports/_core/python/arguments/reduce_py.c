/* Reductions, conversions and the floating-point environment, as the module has them. */
#include "python/base/py.h"

#include "reduce/float_environment.h"
#include "reduce/reduce.h"
#include "reduce/reduce_kernels.h"

#include <limits.h>

/* Above this reduce() lets other threads run: it takes longer than handing over the interpreter's
   lock. */
#define WITHOUT_GIL ((size_t)32 << 10)

/* Check that the first n operands and `out` are of one length, in whole elements, and aligned to
   them. */
static int check_operands(const Py_buffer *out, const Py_buffer *operands, int n, int dtype) {
    size_t itemsize = pc_itemsize(dtype);
    for (int k = 0; k < n; k++) {
        if (operands[k].len != out->len) {
            PyErr_Format(PyExc_ValueError, "operand %d has %zd bytes, out has %zd", k,
                         operands[k].len, out->len);
            return -1;
        }
        if (!pc_is_aligned(dtype, (uintptr_t)operands[k].buf)) {
            PyErr_Format(PyExc_ValueError, "operand %d is not aligned to its elements", k);
            return -1;
        }
    }
    if ((size_t)out->len % itemsize != 0 || !pc_is_aligned(dtype, (uintptr_t)out->buf)) {
        PyErr_SetString(PyExc_ValueError, "out is not an aligned array of whole elements");
        return -1;
    }
    return 0;
}

static void reduce_buffers(pc_reduce_fn reduce, const Py_buffer *out, const Py_buffer *operands,
                           const void **in, int n, size_t itemsize, int divisor) {
    for (int k = 0; k < n; k++)
        in[k] = operands[k].buf;
    size_t count = (size_t)out->len / itemsize;
    if ((size_t)out->len <= WITHOUT_GIL) {
        reduce(out->buf, in, n, count, divisor);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    reduce(out->buf, in, n, count, divisor);
    Py_END_ALLOW_THREADS
}

static int reduce_sequence(pc_reduce_fn reduce, int dtype, PyObject *target, PyObject *inputs,
                           int divisor) {
    Py_ssize_t n = PySequence_Size(inputs);
    if (n < 0)
        return -1;
    if (n == 0 || n > INT_MAX) {
        PyErr_SetString(PyExc_ValueError, "reduce() needs at least one operand");
        return -1;
    }
    Py_buffer out, *operands = PyMem_Calloc((size_t)n, sizeof *operands + sizeof(void *));
    if (!operands) {
        PyErr_NoMemory();
        return -1;
    }
    int status = -1, got = 0;
    if (PyObject_GetBuffer(target, &out, PyBUF_WRITABLE) == 0) {
        for (; got < n; got++) {
            PyObject *operand = PySequence_GetItem(inputs, got);
            int failed = !operand || PyObject_GetBuffer(operand, &operands[got], PyBUF_SIMPLE) < 0;
            Py_XDECREF(operand);
            if (failed)
                break;
        }
        if (got == n && check_operands(&out, operands, got, dtype) == 0) {
            reduce_buffers(reduce, &out, operands, (const void **)(operands + n), got,
                           pc_itemsize(dtype), divisor);
            status = 0;
        }
        PyBuffer_Release(&out);
    }
    while (got > 0)
        PyBuffer_Release(&operands[--got]);
    PyMem_Free(operands);
    return status;
}

/* reduce(op, dtype, out, inputs, divisor=1) */
PyObject *pc_reduce_py(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 && nargs != 5)
        return PyErr_Format(PyExc_TypeError, "reduce() takes 4 or 5 arguments, not %zd", nargs);
    long op = PyLong_AsLong(args[0]), dtype = PyLong_AsLong(args[1]);
    long divisor = nargs == 5 ? PyLong_AsLong(args[4]) : 1;
    if (PyErr_Occurred())
        return NULL;
    bool numbers = op >= 0 && op < PC_OPS && dtype > 0 && dtype < PC_DTYPES;
    pc_reduce_fn reduce = numbers ? pc_reduce_find((int)op, (int)dtype) : NULL;
    if (!reduce || divisor < 1 || divisor > INT_MAX)
        return PyErr_Format(PyExc_ValueError,
                            "reduce() has no operator %ld for dtype %ld, divisor %ld", op, dtype,
                            divisor);
    if (reduce_sequence(reduce, (int)dtype, args[2], args[3], (int)divisor) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* convert(narrows, dtype, out, in) */
PyObject *pc_convert_py(PyObject *Py_UNUSED(module), PyObject *args) {
    int narrows, dtype;
    Py_buffer out, in;
    if (!PyArg_ParseTuple(args, "piw*y*", &narrows, &dtype, &out, &in))
        return NULL;
    const Py_buffer *halves = narrows ? &out : &in, *wide = narrows ? &in : &out;
    bool known = dtype == PC_FLOAT16 || dtype == PC_BFLOAT16;
    bool fits = known && halves->len % 2 == 0 && wide->len == 2 * halves->len &&
                pc_is_aligned(dtype, (uintptr_t)halves->buf) &&
                pc_is_aligned(PC_FLOAT32, (uintptr_t)wide->buf);
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "convert() takes aligned arrays of one number of 16-bit "
                                          "floats and of float32");
    else {
        pc_convert_fn convert = pc_convert_find(narrows, dtype);
        Py_BEGIN_ALLOW_THREADS
        uint64_t callers = pc_enter_default_floats();
        convert(out.buf, in.buf, (size_t)halves->len / 2);
        pc_leave_default_floats(callers);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&in);
    if (!fits)
        return NULL;
    Py_RETURN_NONE;
}

/* Call args[0] with the others in an environment. */
static PyObject *call_with_floats(uint64_t control, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *arguments = PyTuple_New(nargs - 1);
    if (!arguments)
        return NULL;
    for (Py_ssize_t k = 1; k < nargs; k++)
        PyTuple_SetItem(arguments, k - 1, Py_NewRef(args[k]));
    uint64_t callers = pc_enter_floats(control);
    PyObject *returned = PyObject_CallObject(args[0], arguments);
    pc_leave_floats(control, callers);
    Py_DECREF(arguments);
    return returned;
}

/* with_default_floats(function, *arguments) -> what it returns */
PyObject *pc_with_default_floats(PyObject *Py_UNUSED(module), PyObject *const *args,
                                 Py_ssize_t nargs) {
    if (nargs < 1)
        return PyErr_Format(PyExc_TypeError, "with_default_floats() takes a function");
    return call_with_floats(PC_DEFAULT_FLOATS, args, nargs);
}

/* with_floats(control, function, *arguments) -> what it returns */
PyObject *pc_with_floats(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs < 2)
        return PyErr_Format(PyExc_TypeError, "with_floats() takes an environment and a function");
    unsigned long long control = PyLong_AsUnsignedLongLong(args[0]);
    if (control == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    return call_with_floats(control, args + 1, nargs - 1);
}

/* float_control() -> this thread's environment, for with_floats */
PyObject *pc_float_control(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    return PyLong_FromUnsignedLongLong(pc_read_float_control() & PC_FLOAT_CONTROL);
}

/* reduce_level(level) -> the level in force, or -1 */
PyObject *pc_reduce_level_py(PyObject *Py_UNUSED(module), PyObject *level) {
    long number = PyLong_AsLong(level);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(number < -1 || number > INT_MAX ? -1 : pc_reduce_set_level((int)number));
}
