/* gatherv, all_gatherv, scatterv and all_to_allv: blocks of which only the sender knows the shape.

   In the first round a rank writes what its blocks are into rows of its slot, with the blocks that
   are small; when all were small that is the call. Else each rank reads, in a second round, what it
   needs of the others' memory. The methods do both for arrays at which memory.h can look, and for
   one array or none as `out`. For all else Python says what the blocks are and where they go
   (`Comm.uneven`); also for a call of which a method has heard what it cannot use. */
#include "python/arguments/collective_call.h"
#include "comm.h"
#include "base/copy.h"
#include "python/arguments/timeout.h"

/* Of all rows of a rank; and of one, from many ranks to few. */
#define ROWS_NBYTES ((size_t)8192)
#define MIN_ROW_NBYTES ((size_t)512)
#define MAX_ROW_NBYTES ((size_t)2048)
#define ALIGNMENT 64 /* as in pycoll/_calls/blocks.py */

/* What a rank has left to say after its rows. With long heads the call goes by messages. */
enum { NOTHING, LARGE_BLOCKS, LONG_HEADS };

/* The front of a row; the head of the block and, if it has room, the block follow. */
struct front {
    uint64_t left, address;
};

/* A block of this rank's. */
struct given {
    struct pc_array array;
    const char *head; /* as blocks.py writes it; NULL: `array` says what it is */
    Py_ssize_t head_nbytes;
};

/* A block that comes. */
struct block {
    int rank;
    const unsigned char *head, *elements; /* in the row */
    uint32_t head_nbytes;
    size_t room;            /* behind the head; a longer block is elsewhere, */
    uint64_t address;       /* in its sender's memory */
    struct pc_array place; /* without data: Python copies it */
    intptr_t begin, end;   /* in an `out` that has several */
};

struct uneven_call {
    pc_comm *comm;
    int method, root, dtype;
    uint64_t salt;     /* of a dtype without a code */
    PyObject *x;       /* for who is told of the call; or NULL */
    int num_given, mine; /* and which of these this rank keeps */
    struct given *given;
    size_t row_nbytes;
    unsigned char *rows; /* what the others have said, if that does not fit into slots; or NULL */
    uint64_t left;
    int num_blocks;
    struct block *blocks;
};

static bool gathers(const struct uneven_call *call) {
    return call->method == PC_GATHERV || call->method == PC_ALL_GATHERV;
}

/* Whether this rank reads what another says: all must know alike what comes next, but nobody waits
   for who only receives. */
static bool hears(const struct uneven_call *call, int rank) {
    return call->method != PC_SCATTERV || rank == call->root;
}

static bool has_long_rows(const struct uneven_call *call) {
    return !gathers(call) && call->row_nbytes * (size_t)call->comm->size > ROWS_NBYTES;
}

static struct uneven_call uneven_call(pc_comm *comm, int method, int root, struct given *given,
                                      struct block *blocks) {
    size_t share = ROWS_NBYTES / (size_t)comm->size / ALIGNMENT * ALIGNMENT;
    struct uneven_call call = {.comm = comm, .method = method, .root = root, .given = given,
                               .blocks = blocks};
    call.row_nbytes = gathers(&call) || share > MAX_ROW_NBYTES ? MAX_ROW_NBYTES
                      : share < MIN_ROW_NBYTES                 ? MIN_ROW_NBYTES
                                                               : share;
    call.mine = gathers(&call) ? 0 : comm->rank;
    return call;
}

/* --- the first round -------------------------------------------------------------------------- */

/* Write a row but for its front; what is left to say. */
static uint64_t write_row(const struct given *given, unsigned char *row, size_t row_nbytes) {
    unsigned char *at = row + sizeof(struct front);
    size_t room = row_nbytes - sizeof(struct front), head_nbytes;
    if (given->head == NULL) {
        uint32_t length = pc_describe_memory(&given->array, 0, at + 4);
        memcpy(at, &length, 4);
        head_nbytes = pc_round_up(4 + (size_t)length, ALIGNMENT);
        memset(at + 4 + length, 0, head_nbytes - 4 - length);
    } else {
        head_nbytes = (size_t)given->head_nbytes;
        if (head_nbytes > room)
            return LONG_HEADS;
        memcpy(at, given->head, head_nbytes);
    }
    if (given->array.nbytes > room - head_nbytes)
        return LARGE_BLOCKS;
    pc_copy(at + head_nbytes, given->array.data, given->array.nbytes);
    return NOTHING;
}

static void write_rows(const struct uneven_call *call, unsigned char *rows) {
    uint64_t left = NOTHING;
    for (int index = 0; index < call->num_given; index++) {
        const struct given *given = &call->given[index];
        unsigned char *row = rows + (size_t)index * call->row_nbytes;
        struct front front = {write_row(given, row, call->row_nbytes),
                              (uintptr_t)given->array.data};
        left = front.left > left ? front.left : left;
        memcpy(row, &front, sizeof front);
    }
    for (int index = 0; index < call->num_given; index++)
        memcpy(rows + (size_t)index * call->row_nbytes, &left, sizeof left);
}

static int exchange_slots(struct uneven_call *call, pc_collective *round) {
    pc_comm *comm = call->comm;
    struct pc_slot *slot;
    if (pc_enter_begin(round, &slot) < 0)
        return -1;
    write_rows(call, slot->data);
    pc_enter_end(round, slot);
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank && hears(call, rank) && pc_await_entry(round, rank, &slot) < 0)
            return -1;
    if (call->method != PC_SCATTERV)
        comm->entered_by_all = round->number;
    return 0;
}

static int exchange_long(struct uneven_call *call, pc_collective *round) {
    size_t size = (size_t)call->comm->size, root = (size_t)call->root, nbytes = call->row_nbytes;
    bool scatters = call->method == PC_SCATTERV;
    call->rows = PyMem_Calloc(size + (size_t)call->num_given, nbytes);
    if (call->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    unsigned char *mine = call->rows + size * nbytes;
    write_rows(call, mine);
    round->x = mine;
    round->out = scatters ? call->rows + root * nbytes : call->rows;
    if (scatters && call->num_given > 0) {
        memcpy(round->out, mine + root * nbytes, nbytes);
        round->out = NULL;
    }
    return pc_exchange_run(round);
}

enum { FIRST, SECOND };

static int begin(const struct uneven_call *call, pc_collective *round, int which) {
    static const int kinds[] = {PC_ALL_GATHER, PC_ALL_GATHER, PC_SCATTER, PC_ALL_TO_ALL};
    int kind = which == FIRST ? kinds[call->method - PC_GATHERV] : PC_ALL_GATHER;
    if (pc_call_begin(round, call->comm, kind, call->root) < 0)
        return -1;
    round->method = call->method;
    round->dtype = call->dtype;
    round->x_object = call->x;
    round->nbytes = which == FIRST ? call->row_nbytes : 0;
    intptr_t said[] = {call->method, which};
    uint64_t salt = (uint64_t)PC_PART_UNEVEN << 32 | call->salt;
    pc_sign_part(round, salt, 2, said);
    round->ndim = 0; /* that is no shape */
    return 0;
}

static const unsigned char *row_of(const struct uneven_call *call, int rank) {
    if (call->rows != NULL)
        return call->rows + (size_t)rank * call->row_nbytes;
    size_t begin = gathers(call) ? 0 : (size_t)call->comm->rank * call->row_nbytes;
    return pc_slot_of(call->comm, rank, call->comm->number)->data + begin;
}

/* Say what this rank's blocks are, and read what the others' are, unless that is done. -1 with an
   exception. */
static int first_round(struct uneven_call *call) {
    pc_comm *comm = call->comm;
    if (!comm->heard) {
        pc_collective round;
        if (begin(call, &round, FIRST) < 0)
            return -1;
        int status = has_long_rows(call) ? exchange_long(call, &round)
                                         : exchange_slots(call, &round);
        if (pc_call_end_with(&round, status, Py_None) == NULL)
            return -1;
        Py_DECREF(Py_None);
    }
    comm->heard = false;
    bool takes = call->method != PC_GATHERV || comm->rank == call->root;
    for (int rank = 0; rank < comm->size; rank++) {
        if (!hears(call, rank))
            continue;
        const unsigned char *row = row_of(call, rank);
        struct front front;
        uint32_t length;
        memcpy(&front, row, sizeof front);
        call->left = front.left > call->left ? front.left : call->left;
        if (!takes || front.left == LONG_HEADS)
            continue;
        struct block *block = &call->blocks[call->num_blocks++];
        block->rank = rank;
        block->address = front.address;
        block->head = row + sizeof front;
        memcpy(&length, block->head, 4);
        block->head_nbytes = 4 + length;
        block->elements = block->head + pc_round_up(block->head_nbytes, ALIGNMENT);
        block->room = call->row_nbytes - (size_t)(block->elements - row);
        block->place.data = block->place.held.obj = NULL;
    }
    return 0;
}

/* --- the second round ------------------------------------------------------------------------- */

/* Copy what is here, and note what must be read from the others' memory; how much that is. */
static size_t fill(const struct uneven_call *call, struct pc_piece *pieces) {
    size_t count = 0;
    for (int index = 0; index < call->num_blocks; index++) {
        const struct block *block = &call->blocks[index];
        const struct pc_array *place = &block->place;
        if (place->data == NULL)
            continue;
        if (block->rank == call->comm->rank)
            pc_copy(place->data, call->given[call->mine].array.data, place->nbytes);
        else if (place->nbytes <= block->room)
            memcpy(place->data, block->elements, place->nbytes);
        else
            pieces[count++] =
                (struct pc_piece){block->rank, block->address, place->data, place->nbytes};
    }
    return count;
}

/* Bring the blocks to their places. With `status` -1 there is an exception instead, with which this
   rank gives up: the others may wait in the second round. -1 with an exception. */
static int second_round(const struct uneven_call *call, int status) {
    struct pc_piece pieces[call->comm->size];
    pc_collective round;
    size_t count = status == 0 ? fill(call, pieces) : 0;
    if (call->left == NOTHING)
        return status;
    if (begin(call, &round, SECOND) < 0)
        return -1;
    if (status == 0)
        status = pc_direct_fetch(&round, pieces, count);
    if (pc_call_end_with(&round, status, Py_None) == NULL)
        return -1;
    Py_DECREF(Py_None);
    return 0;
}

static void release(const struct uneven_call *call) {
    for (int index = 0; index < call->num_given; index++)
        pc_memory_release(&call->given[index].array);
    for (int index = 0; index < call->num_blocks; index++)
        pc_memory_release(&call->blocks[index].place);
    PyMem_Free(call->rows);
}

/* --- methods ---------------------------------------------------------------------------------- */

/* Look at this rank's array, or one array for each rank, all of one dtype; `kept` gets what keeps
   them, for a list may change meanwhile. False: leave it to Python. */
static bool view_given(struct uneven_call *call, PyObject *x, PyObject **kept) {
    int size = call->comm->size, count = gathers(call) ? 1 : size;
    if (!gathers(call)) {
        if (!PyList_CheckExact(x) && !PyTuple_CheckExact(x))
            return false;
        *kept = PyList_CheckExact(x) ? PyList_AsTuple(x) : Py_NewRef(x);
        if (*kept == NULL)
            PyErr_Clear();
        if (*kept == NULL || PyTuple_Size(*kept) != size)
            return false;
    }
    for (int index = 0; index < count; index++) {
        PyObject *item = gathers(call) ? x : PyTuple_GetItem(*kept, index);
        struct pc_array *array = &call->given[index].array;
        call->given[index].head = NULL;
        if (!pc_memory_of(item, array))
            return false;
        call->num_given++;
        call->x = index == 0 ? item : call->x;
        if (array->ndim > PC_DESCRIBED_DIMS || array->dtype != call->given[0].array.dtype)
            return false;
    }
    call->dtype = call->method == PC_SCATTERV ? 0 : call->given[0].array.dtype;
    return true;
}

/* Whether blocks of this shape can stand in `out` one after the other. */
static bool rows_alike(const struct pc_array *whole, int ndim, const intptr_t *dims) {
    return ndim == whole->ndim && ndim > 0 && dims_equal(ndim - 1, dims + 1, whole->dims + 1);
}

/* Whether `whole`, where blocks go, may be that, as far as is known. */
static bool may_be_out(const struct uneven_call *call, const struct pc_array *whole) {
    if (whole->ndim == 0)
        return false;
    for (int index = 0; index < call->num_given; index++) {
        const struct pc_array *array = &call->given[index].array;
        const char *a = array->data, *b = whole->data;
        if (array->dtype != whole->dtype || !(a + array->nbytes <= b || b + whole->nbytes <= a))
            return false;
    }
    if (call->num_given == 0)
        return true;
    const struct pc_array *mine = &call->given[call->mine].array;
    if (call->method == PC_SCATTERV)
        return mine->ndim == whole->ndim && dims_equal(mine->ndim, mine->dims, whole->dims);
    return rows_alike(whole, mine->ndim, mine->dims) && mine->dims[0] <= whole->dims[0];
}

/* Make the array of a block, or find its place in `out`, where `row` is the next that is free.
   NULL, perhaps with an exception: Python must. */
static PyObject *place_of(const struct uneven_call *call, struct block *block, PyObject *out,
                          const struct pc_array *whole, intptr_t *row) {
    struct pc_described said;
    if (!pc_read_description(block->head + 4, block->head_nbytes - 4, &said) ||
        (call->num_given > 0 && said.dtype != call->given[0].array.dtype))
        return NULL;
    struct pc_array *place = &block->place;
    if (out == NULL)
        return pc_memory_empty(said.library, said.format, said.dtype, said.ndim, said.dims, place);
    place->nbytes = said.nbytes;
    bool is_alike = said.dtype == whole->dtype;
    if (call->method == PC_SCATTERV) {
        place->data = whole->data;
        is_alike &= said.ndim == whole->ndim && dims_equal(said.ndim, said.dims, whole->dims);
        return is_alike ? Py_NewRef(out) : NULL;
    }
    if (!is_alike || !rows_alike(whole, said.ndim, said.dims) ||
        said.dims[0] > whole->dims[0] - *row)
        return NULL;
    size_t row_nbytes = whole->dims[0] > 0 ? whole->nbytes / (size_t)whole->dims[0] : 0;
    place->data = (char *)whole->data + (size_t)*row * row_nbytes;
    block->begin = *row;
    block->end = *row += said.dims[0];
    return Py_NewRef(Py_None); /* a slice, when the block has come: it may be a copy */
}

/* What the caller gets; NULL, perhaps with an exception: Python must find places. */
static PyObject *result_of(const struct uneven_call *call, PyObject *out,
                           const struct pc_array *whole) {
    intptr_t row = 0;
    if (call->num_blocks == 0)
        return Py_NewRef(Py_None);
    if (call->method == PC_SCATTERV)
        return place_of(call, &call->blocks[0], out, whole, &row);
    PyObject *list = PyList_New(call->num_blocks);
    for (int index = 0; list != NULL && index < call->num_blocks; index++) {
        PyObject *made = place_of(call, &call->blocks[index], out, whole, &row);
        if (made != NULL)
            PyList_SetItem(list, index, made);
        else
            Py_CLEAR(list);
    }
    if (list != NULL && out != NULL && row != whole->dims[0])
        Py_CLEAR(list);
    return list;
}

static PyObject *run(struct uneven_call *call, PyObject *out, const struct pc_array *whole) {
    if (first_round(call) < 0)
        return NULL;
    PyObject *result = call->left < LONG_HEADS ? result_of(call, out, whole) : NULL;
    if (result == NULL && !PyErr_Occurred()) {
        call->comm->heard = call->comm->goes_on = true; /* in Python, from there */
        return NULL;
    }
    if (second_round(call, result != NULL ? 0 : -1) < 0)
        Py_CLEAR(result);
    bool cuts = result != NULL && out != NULL && call->method != PC_SCATTERV;
    for (int index = 0; cuts && result != NULL && index < call->num_blocks; index++) {
        const struct block *block = &call->blocks[index];
        PyObject *slice = PySequence_GetSlice(out, block->begin, block->end);
        if (slice != NULL)
            PyList_SetItem(result, index, slice);
        else
            Py_CLEAR(result);
    }
    return result;
}

PyObject *pc_shared_uneven(pc_comm *comm, int method, PyObject **values) {
    struct given given[comm->size];
    struct block blocks[comm->size];
    struct pc_array whole = {0};
    struct pc_deadline deadline = {0, 0};
    int root = find_root(values[ROOT], comm->size);
    struct uneven_call call = uneven_call(comm, method, root, given, blocks);
    bool is_root = comm->rank == root, gives = method != PC_SCATTERV || is_root;
    PyObject *x = method == PC_SCATTERV || method == PC_ALL_TO_ALLV ? values[XS] : values[X];
    PyObject *out = is_none(values[OUT]) || (method == PC_GATHERV && !is_root) ? NULL : values[OUT];
    PyObject *kept = NULL, *result = NULL;
    if (root >= 0 && comm->direct && !has_long_rows(&call) &&
        pc_timeout(values[TIMEOUT], comm->op_timeout_ns, &deadline.timeout_ns) &&
        (!gives || (x != NULL && view_given(&call, x, &kept))) &&
        (out == NULL || (pc_target_of(out, &whole) && may_be_out(&call, &whole) &&
                         pc_tell_written(&whole, out) == 0))) {
        pc_claim(comm, deadline); /* no other thread comes in between the rounds */
        result = run(&call, out, &whole);
        if (comm->heard)
            comm->kept = Py_XNewRef(kept);
        else
            comm->claimed = false;
    }
    release(&call);
    pc_memory_release(&whole);
    Py_XDECREF(kept);
    return result;
}

/* --- calls from Python, whose arguments are checked ------------------------------------------- */

/* Ask Python where the blocks go. -1 with an exception. */
static int find_places(const struct uneven_call *call, PyObject *places) {
    PyObject *heads = PyList_New(call->num_blocks), *found = NULL;
    for (int index = 0; heads != NULL && index < call->num_blocks; index++) {
        const struct block *block = &call->blocks[index];
        PyList_SetItem(heads, index, PyBytes_FromStringAndSize((const char *)block->head,
                                                               (Py_ssize_t)block->head_nbytes));
    }
    if (heads != NULL && !PyErr_Occurred())
        found = PyObject_CallFunctionObjArgs(places, heads, NULL);
    for (int index = 0; found != NULL && index < call->num_blocks; index++) {
        struct pc_array *place = &call->blocks[index].place;
        PyObject *item = PySequence_GetItem(found, index);
        if (item == NULL ||
            (item != Py_None && PyObject_GetBuffer(item, &place->held, PyBUF_WRITABLE) < 0)) {
            Py_CLEAR(found);
        } else if (item != Py_None) {
            place->data = place->held.buf;
            place->nbytes = (size_t)place->held.len;
        }
        Py_XDECREF(item);
    }
    Py_XDECREF(heads);
    Py_XDECREF(found);
    return found != NULL ? 0 : -1;
}

/* uneven(method, dtype, salt, root, given, places) -> whether it must go by messages */
PyObject *pc_comm_uneven(pc_comm *comm, PyObject *args) {
    int method, dtype, root;
    unsigned long long salt;
    PyObject *items, *places, *result = NULL;
    struct given given[comm->size];
    struct block blocks[comm->size];
    if (!PyArg_ParseTuple(args, "iiKiO!O", &method, &dtype, &salt, &root, &PyList_Type, &items,
                          &places) ||
        pc_check_attached(comm) < 0)
        return NULL;
    struct uneven_call call = uneven_call(comm, method, root, given, blocks);
    call.dtype = dtype;
    call.salt = salt;
    for (; call.num_given < PyList_Size(items); call.num_given++) {
        struct given *each = &given[call.num_given];
        if (!PyArg_ParseTuple(PyList_GetItem(items, call.num_given), "y#y*", &each->head,
                              &each->head_nbytes, &each->array.held))
            break;
        each->array.data = each->array.held.buf;
        each->array.nbytes = (size_t)each->array.held.len;
    }
    if (!PyErr_Occurred() && first_round(&call) == 0) {
        bool by_messages = call.left == LONG_HEADS || (call.left != NOTHING && !comm->direct);
        if (by_messages ||
            second_round(&call, call.num_blocks > 0 ? find_places(&call, places) : 0) == 0)
            result = PyBool_FromLong(by_messages);
    }
    release(&call);
    return result;
}
