/* NumPy's arrays in the arena (arena.h): an allocator for NumPy (NEP 49).

   NumPy asks a handler for the memory of each array, and remembers which, so that the same one
   frees it. Which handler is the current one is a context variable, and a new thread begins with an
   empty context: it has the default handler. So it is the functions of the default handler that are
   replaced here, whose address is a part of NumPy's interface (PyDataMem_DefaultHandler); then it
   does not matter which thread makes an array, and which frees it. They pass on to the old ones all
   that is not for the arena. */
#include "array_memory.h"

#include "host/arena.h"

#include <errno.h>
#include <sys/mman.h>

/* As NumPy declares them, in version 1 of handlers. */
struct allocator {
    void *context;
    void *(*malloc)(void *context, size_t nbytes);
    void *(*calloc)(void *context, size_t count, size_t nbytes);
    void *(*realloc)(void *context, void *memory, size_t nbytes);
    void (*free)(void *context, void *memory, size_t nbytes);
};
struct handler {
    char name[127];
    uint8_t version;
    struct allocator allocator;
};
#define VERSION 1
#define DEFAULT_HANDLER 306 /* index of PyDataMem_DefaultHandler in NumPy's table */

static struct allocator old;
static struct handler *replaced; /* NULL: NumPy is as it was */
static _Atomic size_t minimum = SIZE_MAX; /* bytes of an array that goes to the arena */
static _Thread_local bool wanted; /* this thread wants the next arrays there, however short */
static _Atomic uint64_t refused, refused_nbytes;

static inline bool is_for_arena(size_t nbytes) {
    return wanted || nbytes >= atomic_load_explicit(&minimum, memory_order_relaxed);
}

static void *take(size_t nbytes, bool zero) {
    void *memory = pc_arena_alloc(nbytes, zero);
    if (memory == NULL) {
        atomic_fetch_add_explicit(&refused, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&refused_nbytes, nbytes, memory_order_relaxed);
    }
    return memory;
}

static void *array_malloc(void *context, size_t nbytes) {
    void *memory = is_for_arena(nbytes) ? take(nbytes, false) : NULL;
    return memory != NULL ? memory : old.malloc(context, nbytes);
}

static void *array_calloc(void *context, size_t count, size_t nbytes) {
    size_t whole;
    void *memory = NULL;
    if (!__builtin_mul_overflow(count, nbytes, &whole) && is_for_arena(whole))
        memory = take(whole, true);
    return memory != NULL ? memory : old.calloc(context, count, nbytes);
}

static void array_free(void *context, void *memory, size_t nbytes) {
    if (pc_arena_owns(memory))
        pc_arena_free(memory);
    else
        old.free(context, memory, nbytes);
}

static void *array_realloc(void *context, void *memory, size_t nbytes) {
    if (!pc_arena_owns(memory))
        return old.realloc(context, memory, nbytes);
    if (pc_arena_resize(memory, nbytes))
        return memory;
    size_t before = pc_arena_length(memory);
    void *moved = pc_arena_alloc(nbytes, false);
    if (moved == NULL)
        moved = old.malloc(context, nbytes);
    if (moved != NULL) {
        memcpy(moved, memory, before < nbytes ? before : nbytes);
        pc_arena_free(memory);
    }
    return moved;
}

/* Have the pages of NumPy's handler be writable, as its data is anyway; false: they cannot be. */
static bool open_for_writing(const void *memory, size_t nbytes) {
    uintptr_t begin = (uintptr_t)memory / PC_PAGE * PC_PAGE, end = (uintptr_t)memory + nbytes;
    return mprotect((void *)begin, end - begin, PROT_READ | PROT_WRITE) == 0;
}

/* hook_numpy(api) -> bool: have NumPy ask here, given its table of functions; False: it is not as
   expected. */
PyObject *pc_hook_numpy(PyObject *Py_UNUSED(module), PyObject *api) {
    if (replaced == NULL) {
        void **table = PyCapsule_GetPointer(api, PyCapsule_GetName(api));
        if (table == NULL)
            return NULL;
        PyObject **capsule = table[DEFAULT_HANDLER];
        if (capsule == NULL || *capsule == NULL || !PyCapsule_IsValid(*capsule, "mem_handler"))
            Py_RETURN_FALSE;
        struct handler *handler = PyCapsule_GetPointer(*capsule, "mem_handler");
        if (handler == NULL)
            return NULL;
        const struct allocator *asked = &handler->allocator;
        if (handler->version != VERSION || strcmp(handler->name, "default_allocator") != 0 ||
            asked->malloc == NULL || asked->calloc == NULL || asked->realloc == NULL ||
            asked->free == NULL || !open_for_writing(handler, sizeof *handler))
            Py_RETURN_FALSE;
        old = *asked;
        replaced = handler;
        /* `free` first: nothing comes from the arena that it would not know. */
        handler->allocator.free = array_free;
        handler->allocator.realloc = array_realloc;
        handler->allocator.malloc = array_malloc;
        handler->allocator.calloc = array_calloc;
    }
    Py_RETURN_TRUE;
}

/* open_arena([fd, rank, size]): map this process's arena, given the memory file of its host;
   without, as soon as that is there. OSError. */
PyObject *pc_open_arena(PyObject *Py_UNUSED(module), PyObject *args) {
    int fd = -1, rank = 0, size = 1, error = 0;
    if (!PyArg_ParseTuple(args, "|iii", &fd, &rank, &size))
        return NULL;
    if (rank < 0 || rank >= size) {
        PyErr_SetString(PyExc_ValueError, "there is no such rank on this host");
        return NULL;
    }
    if (fd >= 0)
        error = pc_arena_open(fd, rank, size);
    else
        pc_arena_want();
    if (error != 0) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* share_arrays(nbytes or None) -> what it was: arrays of so many bytes and more lie in the arena
   from now on */
PyObject *pc_share_arrays(PyObject *Py_UNUSED(module), PyObject *nbytes) {
    size_t to = nbytes == Py_None ? SIZE_MAX : PyLong_AsSize_t(nbytes);
    if (PyErr_Occurred())
        return NULL;
    size_t from = atomic_exchange(&minimum, to);
    return from == SIZE_MAX ? Py_NewRef(Py_None) : PyLong_FromSize_t(from);
}

/* share_next(bool): whether all arrays that this thread makes lie in the arena */
PyObject *pc_share_next(PyObject *Py_UNUSED(module), PyObject *whether) {
    wanted = PyObject_IsTrue(whether) == 1;
    Py_RETURN_NONE;
}

/* retire_arrays(): the process ends; what it frees from now on is not used again. */
PyObject *pc_retire_arrays(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    pc_arena_retire();
    Py_RETURN_NONE;
}

/* shared_use() -> (arrays, bytes, bytes kept for the next arrays, arrays that found no place, their
   bytes) */
PyObject *pc_shared_use(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused)) {
    struct pc_arena_use use = pc_arena_use();
    return Py_BuildValue("(KKKKK)", (unsigned long long)use.blocks, (unsigned long long)use.nbytes,
                         (unsigned long long)use.kept_nbytes,
                         (unsigned long long)atomic_load(&refused),
                         (unsigned long long)atomic_load(&refused_nbytes));
}

/* is_shared(address, nbytes) -> bool: whether that lies in this process's arena */
PyObject *pc_is_shared(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long address;
    Py_ssize_t nbytes;
    if (!PyArg_ParseTuple(args, "Kn", &address, &nbytes))
        return NULL;
    return PyBool_FromLong(nbytes >= 0 &&
                           pc_arena_has((const void *)(uintptr_t)address, (size_t)nbytes));
}
