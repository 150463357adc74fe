/* The compiled core of pycoll: what Python cannot do. See README.md in this folder. */
#include "python/host/array_memory.h"
#include "python/exchange/comm.h"
#include "python/engine/engine_type.h"
#include "python/host/host_type.h"
#include "python/arguments/memory.h"

extern PyType_Spec pc_guard_spec;
void pc_guard_init(void);
PyObject *pc_reduce_py(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *pc_reduce_level_py(PyObject *module, PyObject *level);
PyObject *pc_convert_py(PyObject *module, PyObject *args);
PyObject *pc_with_default_floats(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *pc_with_floats(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
PyObject *pc_float_control(PyObject *module, PyObject *unused);
PyObject *pc_set_direct_from(PyObject *module, PyObject *args);
PyObject *pc_timer_open(PyObject *module, PyObject *unused);
PyObject *pc_timer_set(PyObject *module, PyObject *args);
PyObject *pc_set_made_at(PyObject *module, PyObject *text);
PyObject *pc_kept_calls(PyObject *module, PyObject *args);
PyObject *pc_wait_all(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pc_take(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *pc_claim_request(PyObject *module, PyObject *request);

/* The type, which the module keeps by that name; NULL with an exception. */
static PyTypeObject *make_type_as(PyObject *module, const char *name, PyType_Spec *spec) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL)
        return NULL;
    int status = PyModule_AddObjectRef(module, name, type);
    Py_DECREF(type);
    return status == 0 ? (PyTypeObject *)type : NULL;
}

static PyTypeObject *make_type(PyObject *module, PyType_Spec *spec) {
    return make_type_as(module, strrchr(spec->name, '.') + 1, spec);
}

static int add_engine_types(PyObject *module, PyTypeObject *comm) {
    PyTypeObject *engine = make_type(module, &pc_engine_spec),
                 *send = make_type(module, &pc_send_spec),
                 *receive = make_type(module, &pc_receive_spec),
                 *context = make_type(module, &pc_context_spec),
                 *request = make_type(module, &pc_request_spec),
                 *plan = make_type(module, &pc_plan_spec),
                 *call = make_type(module, &pc_collective_spec),
                 *table = make_type(module, &pc_table_spec),
                 *piece = make_type(module, &pc_piece_spec),
                 *memory = make_type(module, &pc_memory_spec),
                 *scratch = make_type(module, &pc_scratch_spec),
                 *persistent = make_type(module, &pc_persistent_spec),
                 *both = make_type(module, &pc_both_spec);
    if (engine == NULL || send == NULL || receive == NULL || context == NULL || request == NULL ||
        plan == NULL || call == NULL || table == NULL || piece == NULL || memory == NULL ||
        scratch == NULL || persistent == NULL || both == NULL)
        return -1;
    pc_parker_types(engine);
    pc_send_types(send);
    pc_item_types(receive);
    pc_context_types(engine, context);
    pc_piece_type(piece);
    pc_memory_type(memory);
    pc_scratch_type(scratch);
    pc_persistent_type(persistent);
    pc_both_type(both);
    pc_collective_types(call);
    pc_composed_types(table);
    pc_collectives_types(plan, call, comm);
    pc_request_types(request);
    pc_messages_types(context);
    bool made = make_type(module, &pc_parker_spec) != NULL &&
                make_type_as(module, "Messages", &pc_messages_spec) != NULL &&
                make_type_as(module, "Collectives", &pc_collectives_spec) != NULL &&
                make_type(module, &pc_composed_spec) != NULL &&
                make_type(module, &pc_several_spec) != NULL;
    return made ? 0 : -1;
}

static int execute(PyObject *module) {
    pc_shared_init();
    pc_guard_init();
    PyTypeObject *comm = make_type(module, pc_comm_spec());
    bool made = comm != NULL &&
                make_type(module, &pc_host_spec) != NULL &&
                make_type(module, &pc_guard_spec) != NULL;
    return made ? add_engine_types(module, comm) : -1;
}

static PyMethodDef methods[] = {
    {"hook_numpy", pc_hook_numpy, METH_O, "Have NumPy ask here for the memory of its arrays."},
    {"open_arena", pc_open_arena, METH_VARARGS, "Map this process's arena in its host's memory."},
    {"share_arrays", pc_share_arrays, METH_O,
     "Arrays of so many bytes lie in the arena; returns what it was."},
    {"share_next", pc_share_next, METH_O,
     "Whether all arrays that this thread makes lie in the arena."},
    {"retire_arrays", pc_retire_arrays, METH_NOARGS,
     "The process ends: what it frees is not used again."},
    {"shared_use", pc_shared_use, METH_NOARGS, "What lies in the arena, and what found no place."},
    {"is_shared", pc_is_shared, METH_VARARGS, "Whether bytes lie in this process's arena."},
    {"use_numpy", pc_use_numpy, METH_VARARGS,
     "Look at NumPy arrays directly, if their fields are where they should be."},
    {"add_dtype", pc_add_dtype, METH_VARARGS,
     "Arrays of this NumPy dtype hold elements of that type."},
    {"add_library", pc_add_library, METH_VARARGS,
     "add_library(kind, sample, tell, keep) -> bool: look at arrays of that type directly."},
    {"int_error_text", pc_int_error_text, METH_VARARGS,
     "int_error_text(text, which): what is wrong with a call with an int that does not fit."},
    {"reduce", (PyCFunction)(void (*)(void))pc_reduce_py, METH_FASTCALL,
     "Reduce arrays, from left to right."},
    {"convert", pc_convert_py, METH_VARARGS, "Convert 16-bit floats to float32, or back."},
    {"with_default_floats", (PyCFunction)(void (*)(void))pc_with_default_floats, METH_FASTCALL,
     "Call a function in the default floating-point environment."},
    {"with_floats", (PyCFunction)(void (*)(void))pc_with_floats, METH_FASTCALL,
     "Call a function in a floating-point environment."},
    {"float_control", pc_float_control, METH_NOARGS, "This thread's floating-point environment."},
    {"reduce_level", pc_reduce_level_py, METH_O, "Force a level of processor; for tests."},
    {"set_direct_from", pc_set_direct_from, METH_VARARGS,
     "For measuring: bytes from which on a kind reads directly."},
    {"timer_open", pc_timer_open, METH_NOARGS, "Return a new descriptor for `timer_set`."},
    {"timer_set", pc_timer_set, METH_VARARGS,
     "Have a descriptor readable after so many nanoseconds, once; 0: never."},
    {"forget_plans", pc_forget_plans, METH_NOARGS, "Have all plans of collectives made anew."},
    {"set_made_at", pc_set_made_at, METH_O,
     "This thread's calls were made there, file:line; \"\": where it makes them."},
    {"kept_calls", (PyCFunction)pc_kept_calls, METH_VARARGS,
     "kept_calls(fd, size): what ranks of a host have called last, by its memory."},
    {"wait_all", (PyCFunction)(void (*)(void))pc_wait_all, METH_FASTCALL,
     "wait_all(list, timeout) -> list | None: the results of requests, if all is well."},
    {"take", (PyCFunction)(void (*)(void))pc_take, METH_FASTCALL,
     "take(requests, timeout, several) -> list | None: (place, request) of one that is done, or of "
     "all, for this caller alone; None: that is left to Python."},
    {"claim", pc_claim_request, METH_O,
     "claim(request) -> bool | None: whether no wait has returned its result, and this caller may; "
     "None: it is not the core's."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pycoll._transports._core",
    .m_doc = "The compiled core: shared memory, waiting, shared-memory collectives, reductions.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
