/* A descriptor that becomes readable when some time has passed; Python has its own from 3.13 on. */
#include "py.h"

#include <errno.h>
#include <sys/timerfd.h>

PyObject *pc_timer_open(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    int descriptor = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    return descriptor < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(descriptor);
}

PyObject *pc_timer_set(PyObject *Py_UNUSED(module), PyObject *args) {
    int descriptor;
    unsigned long long nanoseconds;
    if (!PyArg_ParseTuple(args, "iK", &descriptor, &nanoseconds))
        return NULL;
    struct itimerspec once = {
        .it_value = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)},
    };
    if (timerfd_settime(descriptor, 0, &once, NULL) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}
