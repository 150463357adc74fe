/* Arrays of other libraries than NumPy in host memory, and Python's numbers. See memory.h. */
#include "memory.h"

#include "base/copy.h"
#include "dlpack.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static_assert(sizeof(intptr_t) == sizeof(int64_t), "DLPack's shapes are read as ours");

#define MAX_NDIM 64

enum form { MEMORYVIEW, STDLIB_ARRAY, DLPACK, NUMBER, VIEWED };

struct pc_library {
    PyTypeObject *type;
    enum form form;
    int dtype; /* of a number */
    const char *kind;
    /* of those with DLPack */
    const struct dl_exchange *exchange;
    /* Methods that say that the memory holds other values than the array shows; of complex numbers
       the last. */
    PyCFunction is_negated, is_conjugated;
    PyObject *requires_grad; /* the type's descriptor; NULL: an attribute as any other */
    descrgetfunc get_requires_grad;
    PyObject *tell; /* is called with an iterable of arrays that are written to */
    PyCFunction tell_directly; /* the same, if it is a function of C's */
    PyObject *keep; /* returns something that keeps the memory of an array */
};

#define MAX_LIBRARIES 24
static struct pc_library libraries[MAX_LIBRARIES];
/* Also read without the interpreter's lock: what stands before stays. */
static _Atomic int num_libraries;
static PyObject *requires_grad;

static struct pc_library numbers[] = {
    {.form = NUMBER, .dtype = PC_FLOAT64},
    {.form = NUMBER, .dtype = PC_COMPLEX128},
    {.form = NUMBER, .dtype = PC_BOOL},
    {.form = NUMBER, .dtype = PC_INT64},
};
const struct pc_library *const pc_python_int = &numbers[3];

#define MAX_VIEWED 256
/* Types at whose arrays Python looks: NumPy's own subclasses, and libraries without a table. */
static struct viewed {
    PyTypeObject *type;
    PyObject *view;   /* returns an array of NumPy's over the memory of one, or with its values */
    PyObject *target; /* the same of one that is written to, over its memory */
    PyObject *make;   /* makes one of an array of NumPy's; NULL: that is what comes back */
    struct pc_library library; /* that has made x */
} viewed[MAX_VIEWED];
static int num_viewed;

static const struct viewed *viewed_of(PyObject *x) {
    for (int index = 0; index < num_viewed; index++)
        if (viewed[index].type == Py_TYPE(x))
            return &viewed[index];
    return NULL;
}

static const struct pc_library *library_of(PyTypeObject *type) {
    for (int index = 0; index < num_libraries; index++)
        if (libraries[index].type == type)
            return &libraries[index];
    return NULL;
}

/* --- what an array is ------------------------------------------------------------------------- */

/* Codes of dtypes by struct's letters; array.array has those of LETTERS. */
static int dtype_of_letter(char letter) {
    switch (letter) {
    case '?': return PC_BOOL;
    case 'b': return PC_INT8;
    case 'B': return PC_UINT8;
    case 'h': return PC_INT16;
    case 'H': return PC_UINT16;
    case 'i': return PC_INT32;
    case 'I': return PC_UINT32;
    case 'l':
    case 'n':
    case 'q': return PC_INT64;
    case 'L':
    case 'N':
    case 'Q': return PC_UINT64;
    case 'e': return PC_FLOAT16;
    case 'f': return PC_FLOAT32;
    case 'd': return PC_FLOAT64;
    default: return 0;
    }
}
#define LETTERS "bBhHiIlLfd"

static int dtype_of_format(const char *format) {
    if (format == NULL)
        return PC_UINT8;
    if (format[0] != 0 && format[1] == 0)
        return dtype_of_letter(format[0]);
    if (strcmp(format, "Zf") == 0)
        return PC_COMPLEX64;
    return strcmp(format, "Zd") == 0 ? PC_COMPLEX128 : 0;
}

/* Letters that the dtype alone does not tell: int64 is `l`. */
static bool is_told_apart(char format) { return format != 0 && strchr("qQnN", format) != NULL; }

/* Describe what has an address, a dtype and a shape; false: it is not aligned, or nowhere. */
static bool describe(struct pc_array *memory, const struct pc_library *library, void *data,
                     int dtype, int ndim, const intptr_t *dims) {
    size_t itemsize = pc_itemsize(dtype), count = 1;
    size_t alignment = dtype >= PC_COMPLEX64 ? itemsize / 2 : itemsize;
    for (int axis = 0; axis < ndim; axis++)
        count *= (size_t)dims[axis];
    if (data == NULL || (count > 0 && (uintptr_t)data % alignment != 0))
        return false;
    memory->data = data;
    memory->dims = dims;
    memory->ndim = ndim;
    memory->count = count;
    memory->nbytes = count * itemsize;
    memory->dtype = dtype;
    memory->format = 0;
    memory->library = library;
    return true;
}

static int of_buffer(PyObject *x, const struct pc_library *library, struct pc_array *memory) {
    Py_buffer *held = &memory->held;
    if (PyObject_GetBuffer(x, held, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        PyErr_Clear(); /* Python says what is wrong with it, if anything is */
        held->obj = NULL;
        return 0;
    }
    int dtype = dtype_of_format(held->format);
    if (dtype == 0 || !describe(memory, library, held->buf, dtype, held->ndim,
                                (const intptr_t *)held->shape)) {
        PyBuffer_Release(held);
        return 0;
    }
    memory->format = held->format != NULL ? held->format[0] : 'B';
    memory->writeable = !held->readonly;
    return 1;
}

/* Whether a method without arguments returns false. */
static bool is_not(PyCFunction method, PyObject *x) {
    PyObject *answer = method(x, NULL);
    if (answer == NULL)
        PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_False;
}

static int of_tensor(PyObject *x, const struct pc_library *library, struct pc_array *memory) {
    struct dl_tensor tensor;
    if (library->exchange->describe(x, &tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    int dtype = dl_dtype(&tensor);
    if (tensor.device_type != DL_CPU || tensor.data == NULL || dtype == 0 ||
        !dl_is_contiguous(&tensor) ||
        !describe(memory, library, (char *)tensor.data + tensor.byte_offset, dtype, tensor.ndim,
                  (const intptr_t *)tensor.shape))
        return 0;
    memory->writeable = true;
    return is_not(library->is_negated, x) &&
           (dtype < PC_COMPLEX64 || is_not(library->is_conjugated, x));
}

int pc_memory_of_other(PyObject *x, struct pc_array *memory) {
    const struct pc_library *library = library_of(Py_TYPE(x));
    if (library == NULL)
        return 0;
    return library->form == DLPACK ? of_tensor(x, library, memory) : of_buffer(x, library, memory);
}

bool pc_is_array(PyObject *x) {
    return library_of(Py_TYPE(x)) != NULL || pc_is_numpy_array(x) || viewed_of(x) != NULL;
}

/* --- what is not contiguous ------------------------------------------------------------------- */

static bool is_tensor_spread(PyObject *x, struct pc_extent *extent) {
    const struct pc_library *library = library_of(Py_TYPE(x));
    struct dl_tensor tensor;
    if (library == NULL || library->form != DLPACK)
        return false;
    if (library->exchange->describe(x, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    int dtype = dl_dtype(&tensor);
    if (tensor.device_type != DL_CPU || tensor.data == NULL || dtype == 0 ||
        dl_is_contiguous(&tensor) || !is_not(library->is_negated, x) ||
        !is_not(library->is_conjugated, x))
        return false;
    struct pc_array memory = {.writeable = true, .library = library};
    intptr_t itemsize = (intptr_t)pc_itemsize(dtype);
    extent->begin = (const char *)tensor.data + tensor.byte_offset;
    extent->end = extent->begin + itemsize;
    extent->writeable = pc_may_be_target(x, &memory) &&
                        pc_is_injective(tensor.ndim, (const intptr_t *)tensor.shape,
                                        (const intptr_t *)tensor.strides, 1);
    for (int axis = 0; axis < tensor.ndim; axis++) {
        intptr_t steps = tensor.shape[axis] > 0 ? (intptr_t)tensor.shape[axis] - 1 : 0;
        intptr_t reach = steps * (intptr_t)tensor.strides[axis] * itemsize;
        *(reach < 0 ? &extent->begin : &extent->end) += reach;
    }
    return true;
}

/* The name of the method that makes a contiguous copy; NULL: x is contiguous, or no array. */
static const char *spread(PyObject *x, struct pc_extent *extent) {
    if (pc_array_is_spread(x, extent))
        return "copy";
    return is_tensor_spread(x, extent) ? "contiguous" : NULL;
}

static bool overlap(const struct pc_extent *extent, PyObject *other) {
    struct pc_extent two;
    struct pc_array whole;
    if (spread(other, &two) == NULL) {
        if (!pc_memory_of(other, &whole))
            return true;
        two.begin = whole.data;
        two.end = two.begin + whole.nbytes;
        pc_memory_release(&whole);
    }
    return extent->begin < two.end && two.begin < extent->end;
}

/* Python fails, too, and says so; but what a signal handler raised it would not. */
static void forget_error(void) {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
}

static PyObject *copy_of(PyObject *x, const char *copies) {
    PyObject *copy = PyObject_CallMethod(x, copies, NULL);
    forget_error();
    return copy;
}

/* A contiguous array of NumPy's that stands for x; NULL: Python does without, or says why not. */
static PyObject *view_of(PyObject *x, PyObject *how) {
    struct pc_array seen;
    PyObject *view = PyObject_CallFunctionObjArgs(how, x, NULL);
    forget_error();
    if (view != NULL && !pc_array_view(view, &seen))
        Py_CLEAR(view);
    return view;
}

bool pc_is_viewed(PyObject *x) { return viewed_of(x) != NULL; }

bool pc_tell_kind(PyObject *x, struct pc_array *stand_in) {
    const struct viewed *how = viewed_of(x);
    if (how == NULL || how->make == NULL)
        return true;
    stand_in->library = &how->library;
    stand_in->format = 0;
    return strlen(how->library.kind) <= PC_MOST_KIND_NBYTES;
}

PyObject *pc_stand_in(PyObject *x, PyObject *out, bool may_differ) {
    struct pc_extent extent;
    const struct viewed *how = viewed_of(x);
    if (how != NULL)
        return may_differ || how->make == NULL ? view_of(x, how->view) : NULL;
    const char *copies = spread(x, &extent);
    if (copies == NULL)
        return pc_array_of_scalar(x);
    return out == NULL || !overlap(&extent, out) ? copy_of(x, copies) : NULL;
}

/* One array, or a list of several. */
static PyObject *made_again(PyObject *made, const struct viewed *how) {
    if (!PyList_CheckExact(made))
        return PyObject_CallFunctionObjArgs(how->make, made, NULL);
    for (Py_ssize_t index = 0; index < PyList_Size(made); index++) {
        PyObject *item = PyObject_CallFunctionObjArgs(how->make, PyList_GetItem(made, index), NULL);
        if (item == NULL || PyList_SetItem(made, index, item) < 0)
            return NULL;
    }
    return Py_NewRef(made);
}

PyObject *pc_result_of_stand_in(PyObject *x, PyObject *result) {
    const struct viewed *how = viewed_of(x);
    if (pc_is_numpy_scalar(x))
        return pc_array_value(result);
    return how == NULL || how->make == NULL ? Py_NewRef(result) : made_again(result, how);
}

PyObject *pc_target_stand_in(PyObject *target, PyObject *x, bool *is_copy) {
    struct pc_extent extent;
    const struct viewed *how = viewed_of(target);
    *is_copy = how == NULL;
    if (how != NULL)
        return view_of(target, how->target);
    const char *copies = spread(target, &extent);
    bool may_be = copies != NULL && extent.writeable &&
                  (x == NULL || pc_is_numpy_scalar(x) || !overlap(&extent, x));
    if (!may_be)
        return NULL;
    return pc_is_numpy_array(target) ? pc_array_like(target) : copy_of(target, copies);
}

static bool are_alike(const struct pc_array *one, const struct pc_array *other) {
    bool are = one->dtype == other->dtype && one->library == other->library &&
               (one->library == NULL || one->format == other->format) && one->ndim == other->ndim;
    for (int axis = 0; are && axis < one->ndim; axis++) /* of none NumPy's dims are NULL */
        are = one->dims[axis] == other->dims[axis];
    return are;
}

static bool copy_all(PyObject *items, const struct pc_array *first, unsigned char *to) {
    bool are_all = true;
    for (Py_ssize_t index = 0; are_all && index < PyTuple_Size(items); index++) {
        struct pc_array array;
        if (!pc_memory_of(PyTuple_GetItem(items, index), &array))
            return false;
        are_all = are_alike(first, &array);
        if (are_all)
            pc_copy(to + (size_t)index * array.nbytes, array.data, array.nbytes);
        pc_memory_release(&array);
    }
    return are_all;
}

PyObject *pc_stacked(PyObject *list, int count, size_t most) {
    PyObject *items = PyList_CheckExact(list) ? PyList_AsTuple(list) : Py_NewRef(list);
    PyObject *first = items != NULL && PyTuple_Size(items) == count ? PyTuple_GetItem(items, 0)
                                                                    : NULL;
    struct pc_array like, made;
    PyObject *whole = NULL;
    if (first != NULL && pc_memory_of(first, &like)) {
        bool is_stdlib = like.library != NULL && like.library->form == STDLIB_ARRAY;
        if (like.nbytes <= most && !is_stdlib) /* an array.array has one dimension */
            whole = pc_memory_new(&like, first, count, &made);
        if (whole != NULL) {
            bool is_filled = copy_all(items, &like, made.data);
            pc_memory_release(&made);
            if (!is_filled)
                Py_CLEAR(whole);
        }
        pc_memory_release(&like);
    }
    Py_XDECREF(items);
    forget_error();
    return whole;
}

/* --- what is reduced -------------------------------------------------------------------------- */

static int of_number(struct pc_array *memory, const struct pc_library *number) {
    memory->writeable = false;
    return describe(memory, number, &memory->number, number->dtype, 0, NULL);
}

static int64_t mark_of_fitting(int op) { return op == PC_BAND ? -1 : 0; }

static int of_int(PyObject *x, int op, bool is_scan, struct pc_array *memory) {
    static const intptr_t dims[] = {1, 2, 3};
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(x, &overflow);
    if (overflow != 0 || op < 0 || op == PC_AVG)
        return 0;
    if (op >= PC_LAND)
        number = number != 0;
    bool is_gathered = is_scan || op == PC_PROD || op == PC_BXOR;
    bool is_sum = op == PC_SUM && !is_gathered; /* the lower 32 bits, the others with the sign */
    int64_t *packed = memory->number.packed;
    packed[0] = is_sum ? number & 0xFFFFFFFF : number;
    packed[1] = number >> 32;
    packed[1 + is_sum] = is_gathered ? 0 : mark_of_fitting(op);
    memory->writeable = false;
    return describe(memory, pc_python_int, packed, PC_INT64, 1 + is_gathered,
                    &dims[is_gathered ? 0 : 1 + is_sum]);
}

int pc_operand_of_other(PyObject *x, int op, bool is_scan, struct pc_array *memory) {
    if (PyLong_CheckExact(x))
        return of_int(x, op, is_scan, memory);
    if (PyFloat_CheckExact(x)) {
        memory->number.number = PyFloat_AsDouble(x);
        return of_number(memory, &numbers[0]);
    }
    if (PyComplex_CheckExact(x)) {
        memory->number.parts[0] = PyComplex_RealAsDouble(x);
        memory->number.parts[1] = PyComplex_ImagAsDouble(x);
        return of_number(memory, &numbers[1]);
    }
    if (PyBool_Check(x)) {
        memory->number.truth = x == Py_True;
        return of_number(memory, &numbers[2]);
    }
    return pc_memory_of_other(x, memory);
}

int pc_may_be_target(PyObject *target, const struct pc_array *memory) {
    if (!memory->writeable || memory->library->form != DLPACK)
        return memory->writeable;
    /* of one that does Python asks whether anybody traces it */
    const struct pc_library *library = memory->library;
    PyObject *found = library->requires_grad, *type = (PyObject *)library->type;
    PyObject *answer = found != NULL ? library->get_requires_grad(found, target, type)
                                     : PyObject_GetAttr(target, requires_grad);
    if (answer == NULL)
        PyErr_Clear();
    Py_XDECREF(answer);
    return answer == Py_False;
}

bool pc_takes_values(const struct pc_array *memory) {
    return memory->library == NULL || memory->library->form == DLPACK;
}

int pc_target_of_other(PyObject *target, struct pc_array *memory) {
    if (!pc_memory_of_other(target, memory))
        return 0;
    if (pc_may_be_target(target, memory))
        return 1;
    pc_memory_release(memory);
    memory->held.obj = NULL;
    return 0;
}

/* An iterator over one array, used again: a function of C's is done with it when it returns. */
typedef struct {
    PyObject_HEAD
    PyObject *next; /* borrowed */
} pc_once;
static pc_once *once;

static PyObject *once_next(pc_once *self) {
    PyObject *next = Py_XNewRef(self->next);
    self->next = NULL;
    return next;
}

static PyType_Slot once_slots[] = {
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, once_next},
    {0, NULL},
};

static PyType_Spec once_spec = {
    .name = "pycoll._transports._core.Once",
    .basicsize = sizeof(pc_once),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = once_slots,
};

int pc_tell_written_other(const struct pc_array *memory, PyObject *target) {
    const struct pc_library *library = memory->library;
    if (library->form != DLPACK)
        return 0;
    PyObject *answer;
    if (PC_LIKELY(library->tell_directly != NULL)) {
        once->next = target;
        answer = library->tell_directly(PyCFunction_GetSelf(library->tell), (PyObject *)once);
        once->next = NULL;
    } else {
        answer = PyObject_CallFunction(library->tell, "((O))", target);
    }
    Py_XDECREF(answer);
    return answer != NULL ? 0 : -1;
}

PyObject *pc_memory_keeper(const struct pc_array *memory, PyObject *x, bool is_blocking) {
    if (memory->held.obj != NULL)
        return PyMemoryView_FromObject(x);
    if (memory->library != NULL && memory->library->form == DLPACK && !is_blocking)
        return PyObject_CallFunctionObjArgs(memory->library->keep, x, NULL);
    return Py_NewRef(x);
}

/* --- numbers ---------------------------------------------------------------------------------- */

bool pc_is_number(const struct pc_array *memory) {
    return memory->library != NULL && memory->library->form == NUMBER;
}

PyObject *pc_number_object(int dtype, const union pc_number *number) {
    switch (dtype) {
    case PC_BOOL: return PyBool_FromLong(number->truth);
    case PC_COMPLEX128: return PyComplex_FromDoubles(number->parts[0], number->parts[1]);
    default: return PyFloat_FromDouble(number->number);
    }
}

static PyObject *sum_of_ints(int64_t low, int64_t high) {
    int64_t total;
    if (!__builtin_mul_overflow(high, (int64_t)1 << 32, &total) &&
        !__builtin_add_overflow(total, low, &total))
        return PyLong_FromLongLong(total);
    PyObject *parts[] = {PyLong_FromLongLong(high), PyLong_FromLong(32), PyLong_FromLongLong(low)};
    PyObject *shifted = NULL, *sum = NULL;
    if (parts[0] != NULL && parts[1] != NULL && parts[2] != NULL)
        shifted = PyNumber_Lshift(parts[0], parts[1]);
    if (shifted != NULL)
        sum = PyNumber_Add(shifted, parts[2]);
    Py_XDECREF(shifted);
    for (int index = 0; index < 3; index++)
        Py_XDECREF(parts[index]);
    return sum;
}

PyObject *pc_int_object(int op, const union pc_number *number) {
    const int64_t *packed = number->packed;
    if (packed[1 + (op == PC_SUM)] != mark_of_fitting(op))
        return NULL;
    return op == PC_SUM ? sum_of_ints(packed[0], packed[1]) : PyLong_FromLongLong(packed[0]);
}

/* Combine two ints as Python does; those of logical operators are truths already. */
static PyObject *combined(int op, PyObject *one, PyObject *two) {
    int takes_two;
    switch (op) {
    case PC_SUM: return PyNumber_Add(one, two);
    case PC_PROD: return PyNumber_Multiply(one, two);
    case PC_BAND:
    case PC_LAND: return PyNumber_And(one, two);
    case PC_BOR:
    case PC_LOR: return PyNumber_Or(one, two);
    case PC_BXOR:
    case PC_LXOR: return PyNumber_Xor(one, two);
    default:
        takes_two = PyObject_RichCompareBool(two, one, op == PC_MIN ? Py_LT : Py_GT);
        return takes_two < 0 ? NULL : Py_NewRef(takes_two ? two : one);
    }
}

PyObject *pc_folded_ints(int op, const int64_t *gathered, int size, int count) {
    for (int rank = 0; rank < size; rank++)
        if (gathered[2 * rank + 1] != 0)
            return NULL;
    PyObject *total = count > 0 ? PyLong_FromLongLong(gathered[0]) : Py_NewRef(Py_None);
    for (int rank = 1; total != NULL && rank < count; rank++) {
        PyObject *one = total, *two = PyLong_FromLongLong(gathered[2 * (size_t)rank]);
        total = two != NULL ? combined(op, one, two) : NULL;
        Py_DECREF(one);
        Py_XDECREF(two);
    }
    return total;
}

static PyObject *int_error_text(PyObject *text, PyObject *which) {
    static const char *says =
        "does not fit into 64 bits, -2**63 to 2**63 - 1. Pass floats, or write "
        "all_reduce(x, lambda a, b: a + b): functions get ints of any size.";
    if (which != NULL)
        return PyUnicode_FromFormat("%U: %U %s", text, which, says);
    return PyUnicode_FromFormat("%U: an int of another rank %s", text, says);
}

void pc_raise_int_error(PyObject *text, PyObject *which) {
    PyObject *said = text != NULL ? int_error_text(text, which) : NULL;
    if (said != NULL)
        PyErr_SetObject(PyExc_OverflowError, said);
    Py_XDECREF(said);
}

PyObject *pc_int_error_text(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *text, *which;
    if (!PyArg_ParseTuple(args, "UO", &text, &which))
        return NULL;
    return int_error_text(text, which != Py_None ? which : NULL);
}

/* --- new arrays ------------------------------------------------------------------------------- */

static PyObject *new_numpy(int dtype, int ndim, const intptr_t *dims, struct pc_array *made) {
    PyObject *array = pc_array_empty(dtype, ndim, dims);
    made->library = NULL;
    made->held.obj = NULL;
    if (array != NULL && !pc_array_view(array, made))
        Py_CLEAR(array);
    return array;
}

/* Memory that a library gets, by DLPack: that of a NumPy array, or a few bytes of its own. */
struct lent {
    struct dl_managed managed;
    int64_t numbers[]; /* shape and strides; then the bytes, if there is no array */
};

#define FEW_NBYTES 4096
#define ALIGNMENT 16 /* malloc's, and that of the longest elements */

static void delete_lent(struct dl_managed *self) {
    if (self->context != NULL && Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)self->context);
        PyGILState_Release(state);
    }
    free(self);
}

/* NULL, perhaps with an exception: there is no memory. */
static struct lent *lend(int dtype, int ndim, const intptr_t *dims, struct pc_array *made) {
    size_t nbytes = pc_itemsize(dtype);
    size_t head = pc_round_up(sizeof(struct lent) + 2 * (size_t)ndim * sizeof(int64_t), ALIGNMENT);
    for (int axis = 0; axis < ndim; axis++)
        if (__builtin_mul_overflow(nbytes, (size_t)dims[axis], &nbytes))
            return NULL;
    int stored = dtype == PC_BFLOAT16 ? PC_UINT16 : dtype; /* NumPy may have no bfloat16 */
    PyObject *array = nbytes > FEW_NBYTES ? new_numpy(stored, ndim, dims, made) : NULL;
    if (array == NULL && nbytes > FEW_NBYTES)
        return NULL;
    struct lent *lent = malloc(array != NULL ? head : head + nbytes);
    if (lent == NULL) {
        Py_XDECREF(array);
        return NULL;
    }
    lent->managed = (struct dl_managed){
        .version = {1, 0},
        .context = array,
        .deleter = delete_lent,
        .tensor = {.data = array != NULL ? made->data : (char *)lent + head,
                   .device_type = DL_CPU,
                   .ndim = ndim,
                   .shape = lent->numbers,
                   .strides = lent->numbers + ndim},
    };
    return lent;
}

static PyObject *new_tensor(const struct pc_library *library, int dtype, int ndim,
                            const intptr_t *dims, struct pc_array *made) {
    struct lent *lent = lend(dtype, ndim, dims, made);
    if (lent == NULL)
        return NULL;
    struct dl_tensor *tensor = &lent->managed.tensor;
    dl_set_dtype(tensor, dtype);
    int64_t stride = 1;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        tensor->shape[axis] = dims[axis];
        tensor->strides[axis] = stride;
        stride *= dims[axis];
    }
    made->writeable = true;
    (void)describe(made, library, tensor->data, dtype, ndim, (const intptr_t *)tensor->shape);
    void *object;
    if (library->exchange->make(&lent->managed, &object) == 0)
        return object;
    PyErr_Clear(); /* Python makes it otherwise, or says why not */
    return NULL;   /* whose the memory is now nobody has said: rather lost than freed twice */
}

static PyObject *new_stdlib_array(const struct pc_library *library, char format, intptr_t length,
                                  struct pc_array *made) {
    PyObject *one =
        PyObject_CallFunction((PyObject *)library->type, "C(i)", (int)(unsigned char)format, 0);
    PyObject *array = one != NULL ? PySequence_Repeat(one, length) : NULL;
    Py_XDECREF(one);
    if (array != NULL && !pc_memory_of(array, made))
        Py_CLEAR(array);
    return array;
}

PyObject *pc_memory_empty(const struct pc_library *library, char format, int dtype, int ndim,
                          const intptr_t *dims, struct pc_array *made) {
    made->held.obj = NULL;
    if (library == NULL)
        return new_numpy(dtype, ndim, dims, made);
    if (library->form == DLPACK)
        return new_tensor(library, dtype, ndim, dims, made);
    if (library->form == STDLIB_ARRAY && ndim == 1)
        return new_stdlib_array(library, format, dims[0], made);
    if (library->form == MEMORYVIEW && is_told_apart(format))
        return NULL;
    PyObject *array = new_numpy(dtype, ndim, dims, made);
    if (array == NULL || library->form == STDLIB_ARRAY)
        return array; /* an array.array has one dimension */
    PyObject *view = PyMemoryView_FromObject(array);
    Py_DECREF(array); /* which the view keeps */
    return view;
}

PyObject *pc_memory_new(const struct pc_array *like, PyObject *x, Py_ssize_t extra,
                        struct pc_array *made) {
    if (PC_LIKELY(like->library == NULL)) {
        PyObject *array = pc_array_new(like, x, extra);
        made->library = NULL;
        made->held.obj = NULL;
        if (array != NULL && !pc_array_view(array, made))
            Py_CLEAR(array);
        return array;
    }
    intptr_t dims[MAX_NDIM + 1];
    int skipped = extra < 0, added = extra > 0;
    if (like->ndim > MAX_NDIM)
        return NULL;
    if (added)
        dims[0] = extra;
    for (int axis = skipped; axis < like->ndim; axis++)
        dims[axis - skipped + added] = like->dims[axis];
    return pc_memory_empty(like->library, like->format, like->dtype, like->ndim - skipped + added,
                           dims, made);
}

/* --- kinds ------------------------------------------------------------------------------------ */

size_t pc_kind_of_other(const struct pc_array *memory, char *to) {
    const struct pc_library *library = memory->library;
    size_t length = strlen(library->kind);
    memcpy(to, library->kind, length);
    if (library->form != DLPACK && is_told_apart(memory->format)) {
        to[length++] = ':';
        to[length++] = memory->format;
    }
    return length;
}

/* Whether arrays of this kind can be made here, and how. */
static bool is_known(const void *kind, size_t length, int dtype, int ndim,
                     const struct pc_library **library, char *format) {
    *library = NULL;
    if (length == 5 && memcmp(kind, "numpy", 5) == 0)
        return pc_array_itemsize(dtype) != 0;
    for (int index = 0; index < num_libraries; index++) {
        const struct pc_library *known = &libraries[index];
        if (strlen(known->kind) != length || memcmp(kind, known->kind, length) != 0)
            continue;
        *library = known;
        *format = 0;
        for (const char *letter = LETTERS; known->form == STDLIB_ARRAY && *letter != 0; letter++)
            if (dtype_of_letter(*letter) == dtype)
                *format = *letter;
        return pc_array_itemsize(dtype == PC_BFLOAT16 ? PC_UINT16 : dtype) != 0 &&
               (known->form != STDLIB_ARRAY || (*format != 0 && ndim == 1)) &&
               (known->form == DLPACK || dtype != PC_BFLOAT16);
    }
    return false;
}

bool pc_read_description(const unsigned char *description, size_t length,
                         struct pc_described *array) {
    size_t kind_nbytes = length >= 3 ? description[1] : 0;
    if (length < 3 || description[2] > PC_DESCRIBED_DIMS ||
        length != 3 + kind_nbytes + 8 * (size_t)description[2])
        return false;
    array->dtype = description[0];
    array->ndim = description[2];
    array->nbytes = pc_itemsize(array->dtype);
    memcpy(array->dims, description + 3 + kind_nbytes, 8 * (size_t)array->ndim);
    for (int axis = 0; axis < array->ndim; axis++)
        if (array->dims[axis] < 0 ||
            __builtin_mul_overflow(array->nbytes, (size_t)array->dims[axis], &array->nbytes))
            return false;
    return is_known(description + 3, kind_nbytes, array->dtype, array->ndim, &array->library,
                    &array->format);
}

/* --- what is made known ----------------------------------------------------------------------- */

/* A method of an object's that takes no arguments, as a function of C's; NULL: it is none. */
static PyCFunction method_of(PyObject *x, const char *name) {
    PyObject *method = PyObject_GetAttrString(x, name);
    PyCFunction function = NULL;
    if (method != NULL && Py_TYPE(method) == &PyCFunction_Type &&
        PyCFunction_GetFlags(method) == METH_NOARGS && PyCFunction_GetSelf(method) == x)
        function = PyCFunction_GetFunction(method);
    PyErr_Clear();
    Py_XDECREF(method);
    return function;
}

/* Find the descriptor of `requires_grad`, if objects of the type have what it says. */
static void find_requires_grad(struct pc_library *library) {
    PyTypeObject *type = library->type;
    if (PyType_GetSlot(type, Py_tp_getattro) != (void *)PyObject_GenericGetAttr)
        return;
    PyObject *found = PyObject_GetAttr((PyObject *)type, requires_grad);
    if (found != NULL && Py_TYPE(found) == &PyGetSetDescr_Type) {
        library->requires_grad = Py_NewRef(found);
        library->get_requires_grad =
            (descrgetfunc)PyType_GetSlot(&PyGetSetDescr_Type, Py_tp_descr_get);
    }
    PyErr_Clear();
    Py_XDECREF(found);
}

/* The table of a type; NULL: it has none that is read here. */
static const struct dl_exchange *exchange_of(PyTypeObject *type) {
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    const struct dl_exchange *exchange =
        capsule != NULL ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    while (exchange != NULL && exchange->version.major != 1)
        exchange = exchange->older;
    return exchange != NULL && exchange->describe != NULL ? exchange : NULL;
}

/* add_viewed(type, kind, view, target, make) -> bool: Python looks at arrays of that type, as
   `struct viewed` says; `make` may be None. */
PyObject *pc_add_viewed(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *type, *kind, *view, *target, *make;
    if (!PyArg_ParseTuple(args, "O!UOOO", &PyType_Type, &type, &kind, &view, &target, &make))
        return NULL;
    const char *name = PyUnicode_AsUTF8AndSize(kind, NULL);
    for (int index = 0; name != NULL && index < num_viewed; index++)
        if (viewed[index].type == (PyTypeObject *)type)
            Py_RETURN_TRUE;
    if (num_viewed == MAX_VIEWED || name == NULL)
        return name != NULL ? Py_NewRef(Py_False) : NULL;
    viewed[num_viewed] = (struct viewed){
        .type = (PyTypeObject *)Py_NewRef(type),
        .view = Py_NewRef(view),
        .target = Py_NewRef(target),
        .make = make != Py_None ? Py_NewRef(make) : NULL,
        .library = {.form = VIEWED, .kind = name},
    };
    Py_INCREF(kind); /* whose name stays */
    num_viewed++;
    Py_RETURN_TRUE;
}

/* add_library(kind, sample, tell, keep) -> bool: arrays of the sample's type are looked at, if they
   can be. `kind`: memoryview, array, or that of a library with DLPack; for the last two see
   struct pc_library. */
PyObject *pc_add_library(PyObject *Py_UNUSED(module), PyObject *args) {
    static const char *const kinds[] = {"memoryview", "array", "torch"};
    const char *kind;
    PyObject *sample, *tell, *keep;
    if (!PyArg_ParseTuple(args, "sOOO", &kind, &sample, &tell, &keep))
        return NULL;
    int index = 0;
    while (index < 3 && strcmp(kinds[index], kind) != 0)
        index++;
    struct pc_library library = {.type = Py_TYPE(sample), .form = (enum form)index};
    if (requires_grad == NULL)
        requires_grad = PyUnicode_InternFromString("requires_grad");
    if (index == 3 || num_libraries == MAX_LIBRARIES || requires_grad == NULL)
        Py_RETURN_FALSE;
    if (library_of(library.type) != NULL)
        Py_RETURN_TRUE;
    library.kind = kinds[index];
    if (library.form == DLPACK) {
        library.exchange = exchange_of(library.type);
        library.is_negated = method_of(sample, "is_neg");
        library.is_conjugated = method_of(sample, "is_conj");
        if (library.exchange == NULL || library.is_negated == NULL || library.is_conjugated == NULL)
            Py_RETURN_FALSE;
        find_requires_grad(&library);
    }
    if (once == NULL) {
        PyObject *type = PyType_FromSpec(&once_spec);
        once = type != NULL ? (pc_once *)PyType_GenericNew((PyTypeObject *)type, NULL, NULL) : NULL;
        Py_XDECREF(type);
        if (once == NULL)
            return NULL;
    }
    Py_INCREF((PyObject *)library.type);
    library.tell = Py_NewRef(tell);
    if (Py_TYPE(tell) == &PyCFunction_Type && PyCFunction_GetFlags(tell) == METH_O)
        library.tell_directly = PyCFunction_GetFunction(tell);
    library.keep = Py_NewRef(keep);
    libraries[num_libraries] = library;
    num_libraries++;
    Py_RETURN_TRUE;
}
