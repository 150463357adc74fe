/* Collectives by messages on blocks of which only their senders know the length: arrays of
   different shapes (gatherv, all_gatherv, scatterv, all_to_allv) and pickled objects (gather,
   all_gather, all_to_all; broadcast and scatter are announced). See pycoll/_calls/blocks.py and
   object_collectives.py, which say what the messages are.

   What has come is made into arrays and objects when somebody wants the result. A call of which
   something came that is not known here, or does not fit, is held: Python goes on with what has
   come. */
#include "collective.h"

#include "base/copy.h"
#include "python/arguments/memory.h"
#include "python/arguments/objects.h"
#include "python/base/views.h"

#include <stdlib.h>
#include <string.h>

/* A longer array is a view of what has come. */
#define COPIED_NBYTES ((size_t)64 << 10)

static bool is_of_one(int kind) {
    return kind == PC_GATHER || kind == PC_ALL_GATHER || kind == PC_GATHERV ||
           kind == PC_ALL_GATHERV;
}
static bool is_all_to_all(int kind) { return kind == PC_ALL_TO_ALL || kind == PC_ALL_TO_ALLV; }
static bool has_two_rounds(int kind) { return kind == PC_ALL_GATHER || kind == PC_ALL_GATHERV; }

/* --- what this rank gives --------------------------------------------------------------------- */

/* The blocks that it has, as a tuple (new reference); NULL, perhaps with an exception: x is no
   list of them. */
static PyObject *items_of(const pc_collectives *self, int kind, int root, PyObject *x) {
    bool scatters = kind == PC_SCATTERV || kind == PC_SCATTER;
    if (scatters && self->rank != root)
        return PyTuple_New(0);
    if (x == NULL || is_of_one(kind) || kind == PC_BROADCAST)
        return x != NULL ? PyTuple_Pack(1, x) : NULL;
    if (!PyList_CheckExact(x) && !PyTuple_CheckExact(x))
        return NULL;
    PyObject *items = PyList_CheckExact(x) ? PyList_AsTuple(x) : Py_NewRef(x);
    if (items != NULL && PyTuple_Size(items) != self->size)
        Py_CLEAR(items);
    return items;
}

/* Where the bytes of a block are, from `begin` on in the parts of all. */
struct span {
    size_t begin, count, nbytes;
};

struct given {
    int kind;
    bool is_blocking;
    PyObject *kept; /* what the memory belongs to, a list */
    struct pc_blocks *blocks;
    struct span *spans;
};

static bool add_array(struct given *given, size_t index, PyObject *item, bool keeps) {
    struct pc_blocks *blocks = given->blocks;
    struct pc_array array, made;
    if (!pc_memory_of(item, &array))
        return false;
    bool fits = array.ndim <= PC_DESCRIBED_DIMS && (index == 0 || array.dtype == blocks->dtype);
    bool is_later = has_two_rounds(given->kind) && array.nbytes > PC_INLINE_NBYTES;
    PyObject *keeper = fits ? pc_memory_keeper(&array, item, given->is_blocking) : NULL;
    if (keeper != NULL && PyList_SetItem(given->kept, (Py_ssize_t)index, keeper) == 0) {
        unsigned char *head = blocks->heads + index * PC_BLOCK_HEAD_NBYTES;
        size_t nbytes = pc_write_block_head(&array, head);
        struct iovec *parts = &blocks->parts[2 * index];
        parts[0] = (struct iovec){head, nbytes};
        parts[1] = (struct iovec){array.data, array.nbytes};
        given->spans[index] = (struct span){2 * index, is_later ? 1 : 2,
                                            nbytes + (is_later ? 0 : array.nbytes)};
        blocks->dtype = array.dtype;
        blocks->is_later = is_later;
        if (keeps) {
            blocks->own = pc_memory_new(&array, item, 0, &made);
            fits = blocks->own != NULL;
            if (fits) {
                pc_copy(made.data, array.data, array.nbytes);
                pc_memory_release(&made);
            }
        }
    }
    pc_memory_release(&array);
    return fits && keeper != NULL;
}

/* All parts of an object in one piece, which is writable; NULL with an exception. */
static PyObject *copy_of(const struct iovec *parts, size_t count, size_t nbytes) {
    PyObject *copy = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)nbytes);
    char *to = copy != NULL ? PyByteArray_AsString(copy) : NULL;
    for (size_t part = 0; copy != NULL && part < count; to += parts[part++].iov_len)
        pc_copy(to, parts[part].iov_base, parts[part].iov_len);
    return copy;
}

static bool add_object(struct given *given, size_t index, PyObject *parts, bool keeps) {
    struct pc_blocks *blocks = given->blocks;
    struct span *span = &given->spans[index];
    struct pc_views *views = pc_view_parts(parts); /* they stay: the parts are kept */
    span->begin = index > 0 ? span[-1].begin + span[-1].count : 0;
    span->count = views != NULL ? (size_t)views->count : 0;
    for (size_t part = 0; part < span->count; part++) {
        const Py_buffer *view = &views->views[part];
        blocks->parts[span->begin + part] = (struct iovec){view->buf, (size_t)view->len};
        span->nbytes += (size_t)view->len;
    }
    /* also after the call was given up: a link may still look at them */
    bool is_well = views != NULL &&
                   PyList_SetItem(given->kept, (Py_ssize_t)index, Py_NewRef(parts)) == 0;
    pc_views_release(views);
    if (is_well && keeps) {
        blocks->own = copy_of(&blocks->parts[span->begin], span->count, span->nbytes);
        is_well = blocks->own != NULL;
        blocks->own_start = is_well ? PyByteArray_AsString(blocks->own) : NULL;
    }
    if (is_well && has_two_rounds(given->kind) && span->nbytes > PC_INLINE_NBYTES) {
        blocks->length = span->nbytes;
        blocks->parts[span->begin] = (struct iovec){&blocks->length, sizeof blocks->length};
        *span = (struct span){span->begin, 1, sizeof blocks->length};
        blocks->is_later = true;
    }
    return is_well;
}

/* Pickle the items. NULL, perhaps with an exception: leave it to Python. */
static PyObject *dumped(PyObject *items, bool are_items, size_t *num_parts) {
    Py_ssize_t count = PyTuple_Size(items);
    PyObject *all = PyTuple_New(count);
    *num_parts = 0;
    for (Py_ssize_t index = 0; all != NULL && index < count; index++) {
        PyObject *parts = pc_object_parts(PyTuple_GetItem(items, index), are_items);
        if (parts == NULL || PyTuple_SetItem(all, index, parts) < 0)
            Py_CLEAR(all);
        else
            *num_parts += (size_t)PySequence_Size(parts) + 1;
    }
    return all;
}

/* --- where it is ------------------------------------------------------------------------------ */

/* What is empty is somewhere, too. */
static ptrdiff_t address_of(const struct iovec *part) {
    return part->iov_len > 0 ? (ptrdiff_t)(uintptr_t)part->iov_base : 1;
}

static void place(struct pc_chunk_place *place, const struct pc_blocks *blocks,
                  const struct span *span) {
    place->nbytes = span->nbytes;
    place->source = span->count > 0 ? address_of(&blocks->parts[span->begin]) : 1;
    if (span->count > 1 || blocks->is_later) { /* what is `blocks`' has no keeper: links copy it */
        place->parts = &blocks->parts[span->begin];
        place->num_parts = span->count;
    }
}

static void place_all(struct given *given, int rank, int size, size_t count) {
    struct pc_blocks *blocks = given->blocks;
    for (uint32_t chunk = 0; chunk < blocks->num_chunks; chunk++)
        blocks->places[chunk] =
            (struct pc_chunk_place){.nbytes = PC_UNKNOWN, .source = -1, .target = -1};
    for (size_t index = 0; index < count; index++)
        place(&blocks->places[is_of_one(given->kind) ? (size_t)rank : index], blocks,
              &given->spans[index]);
    if (is_all_to_all(given->kind)) { /* its own stays here */
        blocks->places[rank] = (struct pc_chunk_place){.source = 1, .target = -1};
        blocks->places[size + rank] = (struct pc_chunk_place){.source = -1, .target = -1};
    }
}

/* Whether a block can stand in `out`, of rows from one on. */
static bool fits(const struct pc_blocks *blocks, const struct pc_described *block, int index,
                 intptr_t row) {
    const struct pc_out *out = &blocks->out[blocks->are_rows ? 0 : index];
    if (out->object == NULL)
        return true;
    if (block->dtype != out->dtype || block->ndim != out->ndim)
        return false;
    for (int axis = blocks->are_rows; axis < out->ndim; axis++)
        if (block->dims[axis] != out->dims[axis])
            return false;
    return !blocks->are_rows || block->dims[0] <= out->dims[0] - row;
}

/* This rank's own, as it was described. */
static bool read_own(const struct pc_blocks *blocks, struct pc_described *block) {
    const unsigned char *head = blocks->parts[2 * blocks->own_given].iov_base;
    uint32_t length;
    memcpy(&length, head, sizeof length);
    return pc_read_description(head + 4, length, block);
}

/* Look at an array of `out`. False: leave it to Python. */
static bool view_item(struct given *given, struct pc_out *out, PyObject *item, size_t count) {
    struct pc_blocks *blocks = given->blocks;
    struct pc_array array;
    if (!pc_target_of(item, &array))
        return false;
    bool may_be = array.ndim <= PC_MOST_BLOCK_DIMS && (!blocks->are_rows || array.ndim > 0) &&
                  (count == 0 || array.dtype == blocks->dtype);
    for (size_t index = 0; may_be && index < count; index++) {
        const struct iovec *sent = &blocks->parts[2 * index + 1];
        const char *a = sent->iov_base, *b = array.data;
        may_be = a + sent->iov_len <= b || b + array.nbytes <= a;
    }
    PyObject *keeper = may_be ? pc_memory_keeper(&array, item, given->is_blocking) : NULL;
    bool is_kept = keeper != NULL && PyList_Append(given->kept, keeper) == 0;
    if (is_kept) {
        *out = (struct pc_out){.object = Py_NewRef(item),
                               .start = array.data,
                               .nbytes = array.nbytes,
                               .library = array.library,
                               .dtype = array.dtype,
                               .ndim = array.ndim};
        for (int axis = 0; axis < array.ndim; axis++) /* of none NumPy's are NULL */
            out->dims[axis] = array.dims[axis];
    }
    Py_XDECREF(keeper);
    pc_memory_release(&array);
    return is_kept;
}

/* Look at `out`, an array or a tuple. False, perhaps with an exception: leave it to Python. */
static bool view_out(struct given *given, PyObject *out, size_t count) {
    struct pc_blocks *blocks = given->blocks;
    struct pc_described own;
    bool is_one = given->kind == PC_SCATTERV, are_several = PyTuple_CheckExact(out);
    bool is_well = true;
    if (are_several && (is_one || PyTuple_Size(out) != blocks->count))
        return false;
    blocks->are_rows = !is_one && !are_several;
    blocks->out = calloc((size_t)blocks->count, sizeof *blocks->out);
    blocks->ends = calloc((size_t)blocks->count + 1, sizeof *blocks->ends);
    if (blocks->out == NULL || blocks->ends == NULL)
        return false;
    for (int index = 0; is_well && index < (are_several ? blocks->count : 1); index++) {
        PyObject *item = are_several ? PyTuple_GetItem(out, index) : out;
        is_well = item == Py_None || view_item(given, &blocks->out[index], item, count);
    }
    is_well = is_well && (blocks->own_at < 0 ||
                          (read_own(blocks, &own) && fits(blocks, &own, blocks->own_at, 0)));
    for (int index = 0; is_well && index < (are_several ? blocks->count : 1); index++) {
        const struct pc_array told = {.library = blocks->out[index].library};
        is_well = blocks->out[index].object == NULL ||
                  pc_tell_written(&told, blocks->out[index].object) == 0;
    }
    return is_well;
}

/* Of a call in which it gives so many, in so many parts. NULL with an exception. */
static struct pc_blocks *new_blocks(const pc_collectives *self, int kind, bool is_root,
                                    size_t count, size_t num_parts) {
    bool scatters = kind == PC_SCATTERV || kind == PC_SCATTER;
    bool takes = (kind != PC_GATHER && kind != PC_GATHERV) || is_root;
    struct pc_blocks *blocks = calloc(1, sizeof *blocks);
    if (blocks == NULL)
        return (struct pc_blocks *)PyErr_NoMemory();
    blocks->are_objects = !pc_is_uneven(kind);
    blocks->num_chunks = (uint32_t)self->size * (is_all_to_all(kind) ? 2 : 1);
    blocks->first = is_all_to_all(kind) ? self->size : scatters ? self->rank : 0;
    blocks->count = !takes ? 0 : scatters ? 1 : self->size;
    blocks->has_second = has_two_rounds(kind);
    blocks->own_given = kind == PC_SCATTERV || is_all_to_all(kind) ? self->rank : 0;
    blocks->own_at = !takes || (scatters && !is_root) ? -1 : scatters ? 0 : self->rank;
    blocks->places = calloc(blocks->num_chunks, sizeof *blocks->places);
    blocks->grown = calloc(blocks->num_chunks, sizeof *blocks->grown);
    blocks->parts = calloc(num_parts + 1, sizeof *blocks->parts);
    blocks->heads = blocks->are_objects ? NULL : malloc((count + 1) * PC_BLOCK_HEAD_NBYTES);
    if (blocks->places != NULL && blocks->grown != NULL && blocks->parts != NULL &&
        (blocks->are_objects || blocks->heads != NULL))
        return blocks;
    pc_blocks_free(blocks, self->engine);
    return (struct pc_blocks *)PyErr_NoMemory();
}

/* Fill in all; false, perhaps with an exception: leave it to Python. */
static bool add_all(struct given *given, const pc_collectives *self, PyObject *blocks,
                    PyObject *out) {
    size_t count = (size_t)PyTuple_Size(blocks);
    int own_at = given->blocks->own_at;
    bool is_well = true, keeps_any = own_at >= 0 && !pc_is_announced(given->kind);
    if (out != NULL && PyTuple_CheckExact(out)) /* perhaps too short */
        keeps_any = keeps_any && own_at < PyTuple_Size(out) &&
                    PyTuple_GetItem(out, own_at) == Py_None;
    else
        keeps_any = keeps_any && out == NULL;
    for (size_t index = 0; is_well && index < count; index++) {
        PyObject *block = PyTuple_GetItem(blocks, (Py_ssize_t)index);
        bool keeps = keeps_any && (is_of_one(given->kind) || (int)index == self->rank);
        is_well = given->blocks->are_objects ? add_object(given, index, block, keeps)
                                             : add_array(given, index, block, keeps);
    }
    if (is_well && out != NULL)
        is_well = view_out(given, out, count);
    if (is_well)
        place_all(given, self->rank, self->size, count);
    return is_well;
}

struct pc_blocks *pc_blocks_of(const pc_collectives *self, int kind, int root, PyObject *x,
                               PyObject *out, bool is_blocking, PyObject **for_python,
                               PyObject **kept) {
    PyObject *items = items_of(self, kind, root, x);
    size_t count = items != NULL ? (size_t)PyTuple_Size(items) : 0, num_parts = 2 * count;
    if (items != NULL && !pc_is_uneven(kind)) {
        PyObject *parts = dumped(items, kind == PC_ALL_TO_ALL, &num_parts);
        Py_DECREF(items);
        items = parts;
    }
    if (items == NULL)
        return NULL;
    struct given given = {kind, is_blocking, PyList_New((Py_ssize_t)count),
                          new_blocks(self, kind, self->rank == root, count, num_parts),
                          PyMem_Calloc(count + 1, sizeof(struct span))};
    if (given.spans == NULL && !PyErr_Occurred())
        PyErr_NoMemory();
    if (PyErr_Occurred() || !add_all(&given, self, items, out)) {
        pc_blocks_free(given.blocks, self->engine);
        given.blocks = NULL;
        Py_CLEAR(items);
        Py_CLEAR(given.kept);
    }
    *for_python = items;
    *kept = given.kept;
    PyMem_Free(given.spans);
    return given.blocks;
}

void pc_blocks_free(struct pc_blocks *blocks, pc_engine_object *engine) {
    if (blocks == NULL)
        return;
    for (uint32_t chunk = 0; blocks->grown != NULL && chunk < blocks->num_chunks; chunk++)
        pc_memory_let_go(engine, blocks->grown[chunk].memory);
    Py_XDECREF(blocks->own);
    Py_XDECREF(blocks->came);
    for (int index = 0; blocks->out != NULL && index < blocks->count; index++)
        Py_XDECREF(blocks->out[index].object);
    free(blocks->out);
    free(blocks->ends);
    free(blocks->places);
    free(blocks->grown);
    free(blocks->parts);
    free(blocks->heads);
    free(blocks);
}

/* --- what has come ---------------------------------------------------------------------------- */

/* Read what a block is and where its elements begin. False: it is not known here. */
static bool read_head(const struct pc_grown *came, struct pc_described *said, size_t *start) {
    uint32_t length;
    if (came->nbytes < sizeof length)
        return false;
    memcpy(&length, came->memory, sizeof length);
    *start = pc_round_up(4 + (size_t)length, PC_BLOCK_ALIGNMENT);
    return *start <= came->nbytes &&
           pc_read_description((const unsigned char *)came->memory + 4, length, said);
}

/* Its elements must be there, too. */
static bool read_block(const struct pc_grown *came, struct pc_described *said, size_t *start) {
    return read_head(came, said, start) && *start + said->nbytes == came->nbytes;
}

static bool are_whole(const struct pc_blocks *blocks) {
    struct pc_described said;
    size_t start;
    for (int index = 0; index < blocks->count && !blocks->are_objects && !blocks->is_direct;
         index++)
        if (index != blocks->own_at &&
            !read_block(&blocks->grown[blocks->first + index], &said, &start))
            return false;
    return true;
}

/* Whether all fit into `out`, and how. */
static bool all_fit(struct pc_blocks *blocks) {
    size_t start;
    struct pc_described said;
    intptr_t row = 0;
    for (int index = 0; index < blocks->count; index++) {
        const struct pc_grown *came = &blocks->grown[blocks->first + index];
        if (!(index == blocks->own_at ? read_own(blocks, &said)
                                      : read_head(came, &said, &start)) ||
            !fits(blocks, &said, index, row))
            return false;
        if (blocks->are_rows)
            blocks->ends[index] = row += said.dims[0];
    }
    return !blocks->are_rows || row == blocks->out->dims[0];
}

/* Its place in `out`; NULL: it has none. */
static unsigned char *place_in_out(const struct pc_blocks *blocks, int index, size_t *nbytes) {
    const struct pc_out *out = &blocks->out[blocks->are_rows ? 0 : index];
    *nbytes = out->nbytes;
    if (!blocks->are_rows)
        return out->start;
    size_t row_nbytes = out->dims[0] > 0 ? out->nbytes / (size_t)out->dims[0] : 0;
    intptr_t begin = index > 0 ? blocks->ends[index - 1] : 0;
    *nbytes = (size_t)(blocks->ends[index] - begin) * row_nbytes;
    return out->start + (size_t)begin * row_nbytes;
}

/* Copy to `out` what is not there. */
static void fill(const struct pc_blocks *blocks) {
    struct pc_described said;
    size_t start, nbytes;
    for (int index = 0; index < blocks->count; index++) {
        const struct pc_grown *came = &blocks->grown[blocks->first + index];
        unsigned char *to = place_in_out(blocks, index, &nbytes);
        if (to == NULL)
            continue;
        if (index == blocks->own_at)
            pc_copy(to, blocks->parts[2 * blocks->own_given + 1].iov_base, nbytes);
        else if (read_block(came, &said, &start))
            pc_copy(to, (unsigned char *)came->memory + start, nbytes);
    }
}

bool pc_blocks_settle(struct pc_blocks *blocks) {
    if (!are_whole(blocks) || (blocks->out != NULL && !all_fit(blocks)))
        return false;
    if (blocks->out != NULL)
        fill(blocks);
    return true;
}

/* --- the second round ------------------------------------------------------------------------- */

/* How many bytes follow of a block; PC_UNKNOWN: it is not known here. */
static size_t left_of(const struct pc_blocks *blocks, int index) {
    const struct pc_grown *came = &blocks->grown[index];
    struct pc_described said;
    size_t start, left;
    if (index == blocks->own_at) {
        left = blocks->are_objects ? blocks->length : blocks->parts[1].iov_len;
        return blocks->is_later ? left : 0;
    }
    if (!blocks->are_objects) {
        if (!read_head(came, &said, &start))
            return PC_UNKNOWN;
        return came->nbytes == start && said.nbytes > PC_INLINE_NBYTES ? said.nbytes : 0;
    }
    if (came->nbytes != sizeof blocks->length)
        return 0;
    memcpy(&left, came->memory, sizeof left);
    return left;
}

void pc_blocks_look(struct pc_blocks *blocks) {
    for (int index = 0; index < blocks->count; index++) {
        size_t left = left_of(blocks, index);
        blocks->longest = left > blocks->longest ? left : blocks->longest;
    }
}

/* Find a place for what follows of another's block: in `out`, or behind its head. */
static bool place_left(struct pc_blocks *blocks, struct pc_engine *engine, int index) {
    struct pc_chunk_place *place = &blocks->places[index];
    struct pc_grown *came = &blocks->grown[index];
    size_t head_nbytes = blocks->are_objects ? 0 : came->nbytes, nbytes;
    unsigned char *in_out = blocks->is_direct ? place_in_out(blocks, index, &nbytes) : NULL;
    if (in_out != NULL) {
        place->target = (ptrdiff_t)(uintptr_t)in_out;
        return true;
    }
    unsigned char *memory = place->nbytes < PTRDIFF_MAX - head_nbytes
                                ? pc_scratch_take(&engine->scratch, head_nbytes + place->nbytes)
                                : NULL;
    if (memory == NULL)
        return false;
    memcpy(memory, came->memory, head_nbytes);
    pc_engine_give_scratch(engine, came->memory);
    *came = (struct pc_grown){memory, head_nbytes + place->nbytes};
    place->target = (ptrdiff_t)(uintptr_t)(memory + head_nbytes);
    place->target_scratch = memory;
    return true;
}

bool pc_blocks_second(struct pc_blocks *blocks, struct pc_engine *engine) {
    blocks->is_direct = blocks->out != NULL && all_fit(blocks);
    for (int index = 0; index < blocks->count; index++) {
        struct pc_chunk_place *place = &blocks->places[index];
        *place = (struct pc_chunk_place){
            .nbytes = left_of(blocks, index), .source = -1, .target = -1};
        if (index != blocks->own_at) {
            place->target = 1; /* what is empty is somewhere, too */
            if (place->nbytes > 0 && !place_left(blocks, engine, index))
                return false;
        } else if (blocks->are_objects) {
            place->source = (ptrdiff_t)(uintptr_t)blocks->own_start;
            place->source_keeper = blocks->own;
        } else {
            place->source = address_of(&blocks->parts[1]);
        }
    }
    blocks->has_second = false;
    blocks->longest = 0;
    return true;
}

PyObject *pc_blocks_came(struct pc_blocks *blocks, pc_engine_object *engine) {
    if (blocks->came != NULL)
        return Py_NewRef(blocks->came);
    PyObject *list = PyList_New(blocks->count);
    if (list != NULL && blocks->came != NULL) { /* another thread was quicker */
        Py_DECREF(list);
        return Py_NewRef(blocks->came);
    }
    for (int index = 0; list != NULL && index < blocks->count; index++) {
        struct pc_grown *grown = &blocks->grown[blocks->first + index];
        void *memory = grown->memory;
        grown->memory = NULL;
        PyObject *object = pc_memory_object(engine, memory, grown->nbytes);
        if (object == NULL || PyList_SetItem(list, index, object) < 0)
            Py_CLEAR(list);
    }
    blocks->came = Py_XNewRef(list);
    return list;
}

static PyObject *array_of(const pc_collectives *self, PyObject *memory,
                          const struct pc_grown *grown) {
    struct pc_described said;
    struct pc_array made;
    size_t start;
    if (!read_block(grown, &said, &start) || said.nbytes > COPIED_NBYTES)
        return PyObject_CallFunctionObjArgs(self->unpack, memory, NULL);
    PyObject *array =
        pc_memory_empty(said.library, said.format, said.dtype, said.ndim, said.dims, &made);
    if (array == NULL)
        return PyErr_Occurred() ? NULL : PyObject_CallFunctionObjArgs(self->unpack, memory, NULL);
    pc_copy(made.data, (const char *)grown->memory + start, said.nbytes);
    pc_memory_release(&made);
    return array;
}

/* One item of the result. */
static PyObject *item_of(const pc_collectives *self, const struct pc_blocks *blocks,
                         PyObject *came, int index) {
    if (blocks->out != NULL && blocks->are_rows)
        return PySequence_GetSlice(blocks->out->object, index > 0 ? blocks->ends[index - 1] : 0,
                                   blocks->ends[index]);
    if (blocks->out != NULL && blocks->out[index].object != NULL)
        return Py_NewRef(blocks->out[index].object);
    if (index == blocks->own_at)
        return blocks->are_objects ? pc_object_load(Py_NewRef(blocks->own))
                                   : Py_NewRef(blocks->own);
    PyObject *memory = PyList_GetItem(came, index);
    if (memory == NULL || blocks->are_objects)
        return memory != NULL ? pc_object_load(Py_NewRef(memory)) : NULL;
    struct pc_grown grown = {pc_memory_start(memory), blocks->grown[blocks->first + index].nbytes};
    return array_of(self, memory, &grown);
}

PyObject *pc_blocks_result(const pc_collectives *self, struct pc_blocks *blocks, int kind) {
    PyObject *came = pc_blocks_came(blocks, self->engine), *result = NULL;
    if (came == NULL)
        return NULL;
    if (blocks->count == 0) {
        result = Py_NewRef(Py_None);
    } else if (kind == PC_SCATTERV) {
        result = item_of(self, blocks, came, 0);
    } else {
        result = PyList_New(blocks->count);
        for (int index = 0; result != NULL && index < blocks->count; index++) {
            PyObject *item = item_of(self, blocks, came, index);
            if (item == NULL || PyList_SetItem(result, index, item) < 0)
                Py_CLEAR(result);
        }
    }
    Py_DECREF(came);
    return result;
}

/* --- objects that are announced --------------------------------------------------------------- */

/* As `Announcement.pack` of rooted.py writes it: form, whether the value is there, its length,
   segments, and the lengths of a name and of a description, which follow. */
enum { LENGTH_AT = 2, NAME_AT = 12, DESCRIPTION_AT = 14, HEAD_NBYTES = 22 };

static size_t number_at(const unsigned char *from, size_t nbytes) {
    size_t number = 0;
    memcpy(&number, from, nbytes);
    return number;
}

bool pc_announces_object(const unsigned char *announcement, size_t nbytes) {
    return nbytes >= HEAD_NBYTES && announcement[0] == 1 && announcement[1] == 1;
}

unsigned char *pc_announce_objects(const pc_collectives *self, const pc_plan *plan,
                                   const struct pc_blocks *blocks, bool scatters, size_t *nbytes) {
    const struct pc_announced *announced = &plan->announced;
    size_t total = 0, count = scatters ? (size_t)self->size : 1;
    for (size_t index = 0; index < count; index++)
        total += blocks->places[index].nbytes;
    unsigned char *said = total <= PC_INLINE_NBYTES && announced->head_nbytes >= HEAD_NBYTES
                              ? malloc(announced->head_nbytes + total)
                              : NULL;
    if (said == NULL)
        return NULL;
    unsigned char *to = said + announced->head_nbytes, *length = to - 8 * count;
    memcpy(said, announced->head, announced->head_nbytes);
    memcpy(said + LENGTH_AT, &total, 8);
    for (size_t index = 0; index < count; index++, length += 8) {
        const struct pc_chunk_place *block = &blocks->places[index];
        if (scatters)
            memcpy(length, &block->nbytes, 8);
        struct iovec one = {(void *)(uintptr_t)block->source, block->nbytes};
        const struct iovec *parts = block->parts != NULL ? block->parts : &one;
        for (size_t part = 0; part < (block->parts != NULL ? block->num_parts : 1); part++) {
            memcpy(to, parts[part].iov_base, parts[part].iov_len);
            to += parts[part].iov_len;
        }
    }
    *nbytes = announced->head_nbytes + total;
    return said;
}

PyObject *pc_announced_object(const pc_collectives *self, int kind,
                              const unsigned char *announcement, size_t nbytes) {
    size_t begin = HEAD_NBYTES + number_at(announcement + NAME_AT, 2), description = begin;
    size_t described = number_at(announcement + DESCRIPTION_AT, 8), length;
    size_t rank = kind == PC_SCATTER ? (size_t)self->rank : 0;
    length = number_at(announcement + LENGTH_AT, 8);
    bool is_sound = begin <= nbytes && described <= nbytes - begin &&
                    (kind != PC_SCATTER || described == 8 * (size_t)self->size);
    begin += is_sound ? described : 0;
    for (size_t before = 0; is_sound && kind == PC_SCATTER && before <= rank; before++) {
        begin += before > 0 ? length : 0;
        length = number_at(announcement + description + 8 * before, 8);
        is_sound = begin <= nbytes;
    }
    struct pc_array into;
    if (!is_sound || length > nbytes - begin) {
        PyErr_SetString(PyExc_ValueError, "an announcement is damaged");
        return NULL;
    }
    PyObject *memory = pc_object_memory(length, &into);
    if (memory == NULL)
        return NULL;
    pc_copy(into.data, announcement + begin, length);
    pc_memory_release(&into);
    return pc_object_load(memory);
}
