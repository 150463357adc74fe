/* The compiled core of pycoll: what Python cannot do. See README.md in this folder. */
#include "array_memory.h"
#include "comm.h"
#include "host_type.h"

extern PyType_Spec pc_guard_spec;
int pc_add_engine_types(PyObject *module);
void pc_guard_init(void);
PyObject *pc_reduce_py(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *pc_reduce_level_py(PyObject *module, PyObject *level);
PyObject *pc_set_direct_from(PyObject *module, PyObject *args);
PyObject *pc_timer_open(PyObject *module, PyObject *unused);
PyObject *pc_timer_set(PyObject *module, PyObject *args);
PyObject *pc_wait_all(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pc_wait_any(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pc_forget_plans(PyObject *module, PyObject *unused);

static int add_type(PyObject *module, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return -1;
    int status = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return status;
}

static int execute(PyObject *module) {
    pc_fast_init();
    pc_guard_init();
    if (add_type(module, &pc_host_spec) < 0 || add_type(module, pc_comm_spec()) < 0 ||
        add_type(module, &pc_guard_spec) < 0 || pc_add_engine_types(module) < 0)
        return -1;
    return 0;
}

static PyMethodDef methods[] = {
    {"hook_numpy", pc_hook_numpy, METH_O, "Have NumPy ask here for the memory of its arrays."},
    {"open_arena", pc_open_arena, METH_VARARGS, "Map this process's arena in its host's memory."},
    {"share_arrays", pc_share_arrays, METH_O, "Arrays of so many bytes lie in the arena; returns what it was."},
    {"share_next", pc_share_next, METH_O, "Whether all arrays that this thread makes lie in the arena."},
    {"retire_arrays", pc_retire_arrays, METH_NOARGS, "The process ends: what it frees is not used again."},
    {"shared_use", pc_shared_use, METH_NOARGS, "What lies in the arena, and what found no place."},
    {"is_shared", pc_is_shared, METH_VARARGS, "Whether bytes lie in this process's arena."},
    {"use_numpy", pc_use_numpy, METH_VARARGS, "Look at NumPy arrays directly, if their fields are where they should be."},
    {"add_dtype", pc_add_dtype, METH_VARARGS, "Arrays of this NumPy dtype hold elements of that type."},
    {"reduce", (PyCFunction)(void (*)(void))pc_reduce_py, METH_FASTCALL, "Reduce arrays, from left to right."},
    {"reduce_level", pc_reduce_level_py, METH_O, "Force a level of processor; for tests."},
    {"set_direct_from", pc_set_direct_from, METH_VARARGS, "For measuring: bytes from which on a kind reads directly."},
    {"timer_open", pc_timer_open, METH_NOARGS, "Return a new descriptor for `timer_set`."},
    {"timer_set", pc_timer_set, METH_VARARGS, "Have a descriptor readable after so many nanoseconds, once; 0: never."},
    {"forget_plans", pc_forget_plans, METH_NOARGS, "Have all plans of collectives made anew."},
    {"wait_all", (PyCFunction)(void (*)(void))pc_wait_all, METH_FASTCALL,
     "wait_all(list, timeout) -> list | None: the results of requests, if all is well."},
    {"wait_any", (PyCFunction)(void (*)(void))pc_wait_any, METH_FASTCALL,
     "wait_any(list, timeout) -> bool: whether a request is done now; if not, it is left to Python."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pycoll._transports._core",
    .m_doc = "The compiled core: shared memory, waiting, native collectives, reductions.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
