/* Timeouts as arguments of calls, and how long the core waits before it leaves a wait to Python. */
#ifndef PC_TIMEOUT_H
#define PC_TIMEOUT_H

#include "python/base/py.h"

#include "base/core.h"

/* A wait of that length is gone on with in Python, which looks at failures and tells the
   launcher. */
#define PC_SLICE_NS 100000000u

static inline uint64_t pc_timeout_ns(double seconds) {
    return seconds < 1e9 ? (uint64_t)(seconds * 1e9) : PC_FOR_EVER;
}

/* The timeout that an argument says, in seconds; NULL and None: the default. False: Python says
   what is wrong with it. */
static inline bool pc_timeout(PyObject *value, uint64_t default_ns, uint64_t *timeout_ns) {
    if (value == NULL || value == Py_None) {
        *timeout_ns = default_ns;
        return true;
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        long seconds = PyLong_AsLongAndOverflow(value, &overflow);
        *timeout_ns = seconds < 1000000000 ? (uint64_t)seconds * 1000000000u : PC_FOR_EVER;
        return overflow == 0 && seconds >= 0;
    }
    double seconds = PyFloat_Check(value) ? PyFloat_AsDouble(value) : -1;
    *timeout_ns = seconds >= 0 ? pc_timeout_ns(seconds) : 0;
    return seconds >= 0;
}

/* A default deadline as Python reads and sets it, in seconds. */
static inline PyObject *pc_seconds(uint64_t timeout_ns) {
    return PyFloat_FromDouble(timeout_ns == PC_FOR_EVER ? Py_HUGE_VAL : (double)timeout_ns / 1e9);
}
static inline int pc_set_timeout(PyObject *value, uint64_t *timeout_ns) {
    double seconds = value != NULL ? PyFloat_AsDouble(value) : -1;
    if (PyErr_Occurred())
        return -1;
    if (!(seconds >= 0)) {
        PyErr_SetString(PyExc_ValueError, "a deadline is seconds, 0 or more");
        return -1;
    }
    *timeout_ns = pc_timeout_ns(seconds);
    return 0;
}

/* timeout.c: the same of the arguments of a `wait(timeout=None)`. */
bool pc_timeout_of_wait(PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                        uint64_t default_ns, uint64_t *timeout_ns);

/* Until when a wait takes place here, and until when at all. */
struct pc_patience {
    uint64_t until_ns, deadline_ns;
};
struct pc_patience pc_patience(uint64_t timeout_ns);
/* What is left, in seconds; NULL with an exception. */
PyObject *pc_patience_left(const struct pc_patience *patience);

#endif
