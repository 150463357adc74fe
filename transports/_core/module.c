/* The compiled core of pycoll: what Python cannot do. See README.md in this folder. */
#include "python/host/array_memory.h"
#include "python/exchange/comm.h"
#include "python/engine/engine_type.h"
#include "python/host/host_type.h"
#include "python/arguments/memory.h"
#include "python/arguments/objects.h"
#include "python/arguments/pickles.h"
#include "python/collectives/composed.h"
#include "python/requests/request.h"

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

PyTypeObject *pc_engine_type, *pc_context_type, *pc_send_type, *pc_receive_type, *pc_piece_type,
    *pc_scratch_type, *pc_started_type, *pc_request_type, *pc_both_type, *pc_persistent_type,
    *pc_plan_type, *pc_memory_type, *pc_collective_type, *pc_comm_type;

extern PyType_Spec pc_guard_spec, pc_engine_spec, pc_parker_spec, pc_context_spec, pc_send_spec,
    pc_receive_spec, pc_piece_spec, pc_scratch_spec, pc_started_spec, pc_request_spec, pc_both_spec,
    pc_persistent_spec, pc_several_spec, pc_messages_spec, pc_plan_spec, pc_memory_spec,
    pc_composed_spec, pc_collective_spec, pc_collectives_spec, pc_comm_spec;

/* The types, each behind its base. */
static const struct {
    const char *name; /* NULL: as its spec says */
    PyType_Spec *spec;
    PyTypeObject **type, **base; /* NULL: nobody asks for it; it has none */
} types[] = {
    {NULL, &pc_host_spec, NULL, NULL},
    {NULL, &pc_guard_spec, NULL, NULL},
    {NULL, &pc_comm_spec, &pc_comm_type, NULL},
    {NULL, &pc_engine_spec, &pc_engine_type, NULL},
    {NULL, &pc_parker_spec, NULL, NULL},
    {NULL, &pc_context_spec, &pc_context_type, NULL},
    {NULL, &pc_send_spec, &pc_send_type, NULL},
    {NULL, &pc_receive_spec, &pc_receive_type, NULL},
    {NULL, &pc_piece_spec, &pc_piece_type, NULL},
    {NULL, &pc_scratch_spec, &pc_scratch_type, NULL},
    {NULL, &pc_started_spec, &pc_started_type, NULL},
    {NULL, &pc_request_spec, &pc_request_type, &pc_started_type},
    {NULL, &pc_both_spec, &pc_both_type, &pc_started_type},
    {NULL, &pc_persistent_spec, &pc_persistent_type, NULL},
    {NULL, &pc_several_spec, NULL, NULL},
    {"Messages", &pc_messages_spec, NULL, NULL},
    {NULL, &pc_plan_spec, &pc_plan_type, NULL},
    {NULL, &pc_memory_spec, &pc_memory_type, NULL},
    {NULL, &pc_composed_spec, NULL, NULL},
    {NULL, &pc_collective_spec, &pc_collective_type, &pc_started_type},
    {"Collectives", &pc_collectives_spec, NULL, NULL},
};

/* Make a type, which the module keeps by its name. 0; -1 with an exception. */
static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject *base,
                    PyTypeObject **made) {
    PyObject *type = PyType_FromSpecWithBases(spec, (PyObject *)base);
    if (type == NULL)
        return -1;
    int status =
        PyModule_AddObjectRef(module, name != NULL ? name : strrchr(spec->name, '.') + 1, type);
    if (made != NULL)
        *made = (PyTypeObject *)type;
    Py_DECREF(type);
    return status;
}

/* Names by their numbers, which only the sources give. */
static const char *const methods_named[] = {
    [PC_BARRIER] = "barrier", [PC_BROADCAST] = "broadcast", [PC_REDUCE] = "reduce",
    [PC_ALL_REDUCE] = "all_reduce", [PC_GATHER] = "gather", [PC_ALL_GATHER] = "all_gather",
    [PC_SCATTER] = "scatter", [PC_REDUCE_SCATTER] = "reduce_scatter",
    [PC_ALL_TO_ALL] = "all_to_all", [PC_SCAN] = "scan", [PC_EXSCAN] = "exscan",
    [PC_REDUCE_SCATTERV] = "reduce_scatterv", [PC_ALL_REDUCE_MANY] = "all_reduce_many",
    [PC_GATHERV] = "gatherv",
    [PC_ALL_GATHERV] = "all_gatherv", [PC_SCATTERV] = "scatterv",
    [PC_ALL_TO_ALLV] = "all_to_allv"};
static const char *const operators[] = {
    [PC_SUM] = "sum", [PC_PROD] = "prod", [PC_MIN] = "min", [PC_MAX] = "max", [PC_AVG] = "avg",
    [PC_BAND] = "band", [PC_BOR] = "bor", [PC_BXOR] = "bxor", [PC_LAND] = "land",
    [PC_LOR] = "lor", [PC_LXOR] = "lxor"};
static const char *const parts[] = {
    [0] = "", [PC_PART_UNEVEN] = "uneven", [PC_PART_MANY] = "many", [PC_PART_GROUP] = "group",
    [PC_PART_OPERATOR] = "operator", [PC_PART_INTS] = "ints",
    [PC_PART_OBJECTS] = "objects"};

static const struct {
    const char *name;
    const char *const *values;
    Py_ssize_t count;
} tuples[] = {
    {"METHODS", methods_named, PC_METHODS},
    {"KINDS", methods_named, PC_KINDS},
    {"UNEVEN", methods_named + PC_GATHERV, PC_METHODS - PC_GATHERV},
    {"OPS", operators, PC_OPS},
    {"PARTS", parts, sizeof parts / sizeof *parts},
};

static const struct {
    const char *name;
    int number;
} numbers[] = {
    {"EVENT_ARRIVED", PC_EVENT_ARRIVED}, {"EVENT_HELD", PC_EVENT_HELD},
    {"EVENT_ENDED", PC_EVENT_ENDED}, {"EVENT_STARTED", PC_EVENT_STARTED},
    {"EVENT_ASKED", PC_EVENT_ASKED}, {"EVENT_FINISHED", PC_EVENT_FINISHED},
    {"EVENT_LOST", PC_EVENT_LOST}, {"EVENT_WANTED", PC_EVENT_WANTED},
    {"EVENT_WATCHED", PC_EVENT_WATCHED},
    {"ORDER_SEND", PC_ORDER_SEND}, {"ORDER_TAKE_BACK", PC_ORDER_TAKE_BACK},
    {"ORDER_ACCEPT", PC_ORDER_ACCEPT}, {"ORDER_REDIRECT", PC_ORDER_REDIRECT},
    {"ORDER_GIVE_UP", PC_ORDER_GIVE_UP},
    {"RECEIVE_POSTED", PC_RECEIVE_POSTED},
    {"RECEIVE_HELD", PC_RECEIVE_HELD}, {"RECEIVE_READING", PC_RECEIVE_READING},
    {"RECEIVE_ENDED", PC_RECEIVE_ENDED},
    {"REQUEST_RECV", PC_RECV},
    {"STATUS_REFUSED", PC_REFUSED}, {"STATUS_TAKEN_BACK", PC_TAKEN_BACK},
    {"STATUS_NO_VALUE", PC_NO_VALUE},
    {"STEP_SEND", PC_STEP_SEND}, {"STEP_RECV", PC_STEP_RECV},
    {"STEP_RECV_SCRATCH", PC_STEP_RECV_SCRATCH}, {"STEP_REDUCE", PC_STEP_REDUCE},
    {"STEP_COPY", PC_STEP_COPY}, {"STEP_EXTERNAL", PC_STEP_EXTERNAL},
    {"VALUE_NOWHERE", PC_VALUE_NOWHERE}, {"VALUE_AT_SOURCE", PC_VALUE_AT_SOURCE},
    {"VALUE_AT_TARGET", PC_VALUE_AT_TARGET},
    {"INLINE_NBYTES", PC_INLINE_NBYTES}, {"GATHERED_NBYTES", PC_GATHERED_NBYTES},
    {"GATHERED_RANKS", PC_GATHERED_RANKS},
    {"WAY_BUFFER", PC_BUFFER}, {"WAY_MAY_PUSH", PC_MAY_PUSH}, {"WAY_OFFER", PC_OFFER},
};

static int add_tuple(PyObject *module, const char *name, const char *const *values,
                     Py_ssize_t count) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t index = 0; tuple != NULL && index < count; index++) {
        PyObject *value = PyUnicode_InternFromString(values[index]);
        if (value == NULL || PyTuple_SetItem(tuple, index, value) < 0)
            Py_CLEAR(tuple);
    }
    int status = tuple != NULL ? PyModule_AddObjectRef(module, name, tuple) : -1;
    Py_XDECREF(tuple);
    return status;
}

static int execute(PyObject *module) {
    pc_shared_init();
    pc_guard_init();
    int status = 0;
    for (size_t index = 0; status == 0 && index < sizeof tuples / sizeof *tuples; index++)
        status = add_tuple(module, tuples[index].name, tuples[index].values, tuples[index].count);
    for (size_t index = 0; status == 0 && index < sizeof numbers / sizeof *numbers; index++)
        status = PyModule_AddIntConstant(module, numbers[index].name, numbers[index].number);
    for (size_t index = 0; status == 0 && index < sizeof types / sizeof *types; index++)
        status = add_type(module, types[index].name, types[index].spec,
                          types[index].base != NULL ? *types[index].base : NULL,
                          types[index].type);
    return status;
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
    {"add_viewed", pc_add_viewed, METH_VARARGS,
     "add_viewed(type, kind, view, target, make) -> bool: Python looks at arrays of that type."},
    {"use_objects", pc_use_objects, METH_VARARGS,
     "use_objects(dump, dump_any, new_bytes): how objects are pickled that are not plain; they "
     "return the parts, `dump` None for what is, or may be, an array."},
    {"int_error_text", pc_int_error_text, METH_VARARGS,
     "int_error_text(text, which): what is wrong with a call with an int that does not fit."},
    {"use_reducer", pc_use_reducer, METH_O,
     "use_reducer(reduce_other): of arrays that `reduce_object` does not know."},
    {"plain_object", pc_plain_object_py, METH_O,
     "plain_object(x) -> bytes | None: those that are sent, if it is small and plain."},
    {"object_parts", pc_object_parts_py, METH_VARARGS,
     "object_parts(pickled, buffers) -> list[memoryview]: those that are sent of an object."},
    {"load_object", pc_load_object_py, METH_O,
     "load_object(memory): the object in writable memory."},
    {"reduce_object", pc_reduce_object_py, METH_O, "A `reducer_override` that knows arrays."},
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
