#include "timeout.h"

bool pc_timeout_of_wait(PyObject *const *args, Py_ssize_t count, PyObject *keywords,
                        uint64_t default_ns, uint64_t *timeout_ns) {
    Py_ssize_t named = keywords != NULL ? PyTuple_Size(keywords) : 0;
    if (count + named > 1 || (named == 1 && PyUnicode_CompareWithASCIIString(
                                                PyTuple_GetItem(keywords, 0), "timeout") != 0))
        return false;
    return pc_timeout(count + named == 1 ? args[0] : NULL, default_ns, timeout_ns);
}

struct pc_patience pc_patience(uint64_t timeout_ns) {
    uint64_t now = pc_now_ns(), deadline = pc_time_after(now, timeout_ns);
    uint64_t slice = timeout_ns > 0 ? now + PC_SLICE_NS : 0; /* 0: Python looks once */
    return (struct pc_patience){.until_ns = slice < deadline ? slice : deadline,
                                .deadline_ns = deadline};
}

PyObject *pc_patience_left(const struct pc_patience *patience) {
    if (patience->deadline_ns == PC_FOR_EVER)
        return PyFloat_FromDouble(Py_HUGE_VAL);
    uint64_t now = pc_now_ns();
    return PyFloat_FromDouble(
        now < patience->deadline_ns ? (double)(patience->deadline_ns - now) / 1e9 : 0.0);
}
