/* Arrays of any library in host memory, described as NumPy's are: those of NumPy, memoryview and
   array.array, and what has the exchange table of DLPack 1.3 (PyTorch's tensors). For reductions
   Python's numbers, too. What is not contiguous, not aligned, on a device, or of a type that was
   not made known (`add_library`) is none of them; Python knows what to do with it.

   With the interpreter's lock, but for `pc_read_description`. */
#ifndef PC_MEMORY_H
#define PC_MEMORY_H

#include "arrays.h"

#include <string.h>

/* What comes back as the same kind of array: a type, and how its memory is found. */
struct pc_library;

/* 1: x is such an array, whose memory stays until `pc_memory_release`, or as long as it is what
   `pc_memory_keeper` returned; else 0, no exception, and nothing to release. */
int pc_memory_of_other(PyObject *x, struct pc_array *memory);
static inline int pc_memory_of(PyObject *x, struct pc_array *memory) {
    memory->library = NULL;
    memory->held.obj = NULL;
    return PC_LIKELY(pc_array_view(x, memory)) ? 1 : pc_memory_of_other(x, memory);
}
/* The same for what is reduced; numbers (bool, float, complex) are arrays of no dimensions, whose
   memory is in the description: it must stay where it is. An int is one of two or three int64: the
   number and a mark, see pycoll/_calls/number_plans.py. An all_reduce by `op` combines them, or
   where that is not enough (`is_scan`: it never is) all ranks gather them. Python takes those that
   do not fit into 64 bits. */
int pc_operand_of_other(PyObject *x, int op, bool is_scan, struct pc_array *memory);
static inline int pc_operand_of(PyObject *x, int op, bool is_scan, struct pc_array *memory) {
    memory->library = NULL;
    memory->held.obj = NULL;
    return PC_LIKELY(pc_array_view(x, memory)) ? 1 : pc_operand_of_other(x, op, is_scan, memory);
}
/* The same for what is written to, and may be. */
int pc_target_of_other(PyObject *target, struct pc_array *memory);
static inline int pc_target_of(PyObject *target, struct pc_array *memory) {
    memory->library = NULL;
    memory->held.obj = NULL;
    return PC_LIKELY(pc_array_view(target, memory)) ? memory->writeable
                                                    : pc_target_of_other(target, memory);
}

/* The same for what `x` describes already, and need not be released. */
int pc_may_be_target(PyObject *target, const struct pc_array *memory);
static inline int pc_target_again(PyObject *target, const struct pc_array *x,
                                  struct pc_array *memory) {
    *memory = *x;
    memory->held.obj = NULL;
    return PC_LIKELY(x->library == NULL) ? x->writeable : pc_may_be_target(target, x);
}

/* Whether x is an array of such a library, wherever it lies. */
bool pc_is_array(PyObject *x);
/* What stands in for x where that is only read (new reference): a contiguous copy of an array or
   tensor that is not, an array for a scalar of NumPy's, or a view of what Python looks at
   (`add_viewed`), of NumPy's kind; if x is of another kind only if it `may_differ`. NULL without an
   exception: x needs none, or can have none; or it may overlap `out` (NULL: there is none). With an
   exception that is no Exception: a signal handler has raised it. */
PyObject *pc_stand_in(PyObject *x, PyObject *out, bool may_differ);
/* Whether Python looks at x. And have the description of what stands in for it say of what kind x
   is; false: it cannot. */
bool pc_is_viewed(PyObject *x);
bool pc_tell_kind(PyObject *x, struct pc_array *stand_in);
/* The new array, or list of them, that came of it, as x would have had it (new reference). */
PyObject *pc_result_of_stand_in(PyObject *x, PyObject *result);
/* The same for a list or tuple of `count` arrays that are alike, of at most `most` bytes each: one
   array of them. */
PyObject *pc_stacked(PyObject *list, int count, size_t most);
/* The same for what is written to, if it may be; `x`: what is read meanwhile, or NULL. If it is a
   copy, with anything in it, it must be copied to the target then. */
PyObject *pc_target_stand_in(PyObject *target, PyObject *x, bool *is_copy);
/* Copy all of it to the target, which is returned (new reference); NULL with an exception. */
static inline PyObject *pc_filled(PyObject *target, PyObject *stand_in) {
    return PyObject_SetItem(target, Py_Ellipsis, stand_in) == 0 ? Py_NewRef(target) : NULL;
}

static inline void pc_memory_release(struct pc_array *memory) {
    if (PC_UNLIKELY(memory->held.obj != NULL))
        PyBuffer_Release(&memory->held);
}

/* Whether such an array takes another one of its library by `x[...] = y`. */
bool pc_takes_values(const struct pc_array *memory);

/* Tell the library that its array is written to. 0; -1 with an exception. */
int pc_tell_written_other(const struct pc_array *memory, PyObject *target);
static inline int pc_tell_written(const struct pc_array *memory, PyObject *target) {
    return PC_LIKELY(memory->library == NULL) ? 0 : pc_tell_written_other(memory, target);
}

/* An object that keeps the memory of `x` in its place, whatever becomes of x: a new reference, or
   NULL with an exception. In a call that blocks nobody but another thread could do anything. */
PyObject *pc_memory_keeper(const struct pc_array *memory, PyObject *x, bool is_blocking);

/* A new uninitialized array of the same kind and dtype as `x`, which `like` describes: with `extra`
   in front of its shape (0: none), or without its first axis (-1). It is described, too, and must
   be released. NULL, without an exception if Python must make it. */
PyObject *pc_memory_new(const struct pc_array *like, PyObject *x, Py_ssize_t extra,
                        struct pc_array *made);
/* The same by library (NULL: NumPy's), format, dtype and shape. */
PyObject *pc_memory_empty(const struct pc_library *library, char format, int dtype, int ndim,
                          const intptr_t *dims, struct pc_array *made);

/* Whether it is a Python number; and that number as an object. */
bool pc_is_number(const struct pc_array *memory);
PyObject *pc_number_object(int dtype, const union pc_number *number);

/* Whether it is a Python int. */
extern const struct pc_library *const pc_python_int;
static inline bool pc_is_int(const struct pc_array *memory) {
    return memory->library == pc_python_int;
}
/* Whether it is one that all ranks gather. */
static inline bool pc_is_gathered(const struct pc_array *memory) {
    return pc_is_int(memory) && memory->ndim == 2;
}
/* The result of a reduction of ints by `op`; NULL, without an exception if some int has not
   fitted. */
PyObject *pc_int_object(int op, const union pc_number *number);
/* The same of the first `count` of those that all ranks have gathered; None of no ints. */
PyObject *pc_folded_ints(int op, const int64_t *gathered, int size, int count);
/* Raise the error of such a call, with its text (NULL: there is an exception already); `which` int
   that is, NULL: one of another rank. */
void pc_raise_int_error(PyObject *text, PyObject *which);
/* int_error_text(text, which): what that says, with None for NULL */
PyObject *pc_int_error_text(PyObject *module, PyObject *args);

/* The kind, as `conversion.py` names it: its length. */
#define PC_MOST_KIND_NBYTES 24
size_t pc_kind_of_other(const struct pc_array *memory, char *to);

/* What `conversion.describe` writes of an array: code of the dtype, length of the kind's name,
   dimensions, the name, the shape. Written without so many axes; returns its length. */
#define PC_DESCRIBED_DIMS 32
#define PC_LONGEST_DESCRIPTION (3 + PC_MOST_KIND_NBYTES + 8 * PC_DESCRIBED_DIMS)
static inline uint32_t pc_describe_memory(const struct pc_array *x, int skipped,
                                          unsigned char *to) {
    int ndim = x->ndim - skipped;
    uint32_t kind_nbytes = 5;
    if (PC_UNLIKELY(x->library != NULL))
        kind_nbytes = (uint32_t)pc_kind_of_other(x, (char *)to + 3);
    else
        memcpy(to + 3, "numpy", 5);
    to[0] = (unsigned char)x->dtype;
    to[1] = (unsigned char)kind_nbytes;
    to[2] = (unsigned char)ndim;
    for (int axis = 0; axis < ndim; axis++)
        memcpy(to + 3 + kind_nbytes + 8 * axis, &x->dims[axis + skipped], 8);
    return 3 + kind_nbytes + 8 * (uint32_t)ndim;
}
/* What goes before the elements of a block whose shape only its sender knows, as
   pycoll/_calls/blocks.py writes it: the length of the description, that, and zeros. Returns its
   length. */
#define PC_BLOCK_ALIGNMENT 64
static inline size_t pc_write_block_head(const struct pc_array *x, unsigned char *to) {
    uint32_t length = pc_describe_memory(x, 0, to + 4);
    size_t nbytes = pc_round_up(4 + (size_t)length, PC_BLOCK_ALIGNMENT);
    memcpy(to, &length, 4);
    memset(to + 4 + length, 0, nbytes - 4 - length);
    return nbytes;
}
/* Read a description; false: no array of that kind can be made here, or it is too large. Also
   without the interpreter's lock. */
struct pc_described {
    const struct pc_library *library;
    char format;
    int dtype, ndim;
    intptr_t dims[PC_DESCRIBED_DIMS];
    size_t nbytes;
};
bool pc_read_description(const unsigned char *description, size_t length,
                         struct pc_described *array);

PyObject *pc_add_library(PyObject *module, PyObject *args);
PyObject *pc_add_viewed(PyObject *module, PyObject *args);

#endif
