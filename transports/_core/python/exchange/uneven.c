/* The two rounds of calls on blocks of which only the sender knows what they are (uneven.h), and
   such calls from Python. */
#include "uneven.h"

#include "base/copy.h"

/* Of all rows of a rank; and of one, from many ranks to few. */
#define ROWS_NBYTES ((size_t)8192)
#define MIN_ROW_NBYTES ((size_t)512)
#define MAX_ROW_NBYTES ((size_t)2048)

/* The front of a row; the head of the block and, if it has room, the block follow. */
struct front {
    uint64_t left, address;
};

/* --- which call it is ------------------------------------------------------------------------- */

static bool is_of_objects(const struct pc_uneven *call) { return call->method < PC_KINDS; }

/* The kind of its first round. */
static int kind_of(const struct pc_uneven *call) {
    switch (call->method) {
    case PC_SCATTERV:
    case PC_SCATTER: return PC_SCATTER;
    case PC_ALL_TO_ALLV:
    case PC_ALL_TO_ALL: return PC_ALL_TO_ALL;
    default: return PC_ALL_GATHER;
    }
}

bool pc_uneven_gathers(const struct pc_uneven *call) { return kind_of(call) == PC_ALL_GATHER; }

/* Whether the blocks that come are this rank's to have. */
static bool takes(const struct pc_uneven *call) {
    return (call->method != PC_GATHERV && call->method != PC_GATHER) ||
           call->comm->rank == call->root;
}

/* Whether this rank reads what another says: all must know alike what comes next, but nobody waits
   for who only receives. */
static bool hears(const struct pc_uneven *call, int rank) {
    return kind_of(call) != PC_SCATTER || rank == call->root;
}

bool pc_uneven_has_long_rows(const struct pc_uneven *call) {
    return !pc_uneven_gathers(call) && call->row_nbytes * (size_t)call->comm->size > ROWS_NBYTES;
}

struct pc_uneven pc_uneven(pc_comm *comm, int method, int root, struct pc_given *given,
                           struct pc_block *blocks) {
    size_t share = ROWS_NBYTES / (size_t)comm->size / PC_BLOCK_ALIGNMENT * PC_BLOCK_ALIGNMENT;
    struct pc_uneven call = {
        .comm = comm, .method = method, .root = root, .given = given, .blocks = blocks};
    call.row_nbytes = pc_uneven_gathers(&call) || share > MAX_ROW_NBYTES ? MAX_ROW_NBYTES
                      : share < MIN_ROW_NBYTES                           ? MIN_ROW_NBYTES
                                                                         : share;
    call.mine = pc_uneven_gathers(&call) ? 0 : comm->rank;
    return call;
}

/* --- the first round -------------------------------------------------------------------------- */

/* Write a row but for its front; what is left to say. */
static uint64_t write_row(const struct pc_given *given, unsigned char *row, size_t row_nbytes) {
    unsigned char *at = row + sizeof(struct front);
    size_t room = row_nbytes - sizeof(struct front), head_nbytes;
    if (given->head == NULL && given->array.dtype == 0) {
        uint64_t nbytes = given->array.nbytes;
        head_nbytes = PC_BLOCK_ALIGNMENT;
        memset(at, 0, head_nbytes);
        *at = sizeof nbytes;
        memcpy(at + 4, &nbytes, sizeof nbytes);
    } else if (given->head == NULL) {
        head_nbytes = pc_write_block_head(&given->array, at);
    } else {
        head_nbytes = (size_t)given->head_nbytes;
        if (head_nbytes > room)
            return PC_LONG_HEADS;
        memcpy(at, given->head, head_nbytes);
    }
    if (given->array.nbytes > room - head_nbytes)
        return PC_LARGE_BLOCKS;
    pc_copy(at + head_nbytes, given->array.data, given->array.nbytes);
    return PC_NOTHING_LEFT;
}

static void write_rows(const struct pc_uneven *call, unsigned char *rows) {
    uint64_t left = PC_NOTHING_LEFT;
    for (int index = 0; index < call->num_given; index++) {
        const struct pc_given *given = &call->given[index];
        unsigned char *row = rows + (size_t)index * call->row_nbytes;
        struct front front = {write_row(given, row, call->row_nbytes),
                              (uintptr_t)given->array.data};
        left = front.left > left ? front.left : left;
        memcpy(row, &front, sizeof front);
    }
    for (int index = 0; index < call->num_given; index++)
        memcpy(rows + (size_t)index * call->row_nbytes, &left, sizeof left);
}

static int exchange_slots(struct pc_uneven *call, pc_collective *round) {
    pc_comm *comm = call->comm;
    struct pc_slot *slot;
    if (pc_enter_begin(round, &slot) < 0)
        return -1;
    write_rows(call, slot->data);
    pc_enter_end(round, slot);
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank && hears(call, rank) && pc_await_entry(round, rank, &slot) < 0)
            return -1;
    if (kind_of(call) != PC_SCATTER)
        comm->entered_by_all = round->number;
    return 0;
}

static int exchange_long(struct pc_uneven *call, pc_collective *round) {
    size_t size = (size_t)call->comm->size, root = (size_t)call->root, nbytes = call->row_nbytes;
    bool scatters = kind_of(call) == PC_SCATTER;
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

static int begin(const struct pc_uneven *call, pc_collective *round, int which) {
    int kind = which == FIRST ? kind_of(call) : PC_ALL_GATHER;
    if (pc_call_begin(round, call->comm, kind, call->root) < 0)
        return -1;
    round->method = call->method;
    round->dtype = call->dtype;
    round->x_object = call->x;
    round->nbytes = which == FIRST ? call->row_nbytes : 0;
    intptr_t said[] = {call->method, which};
    uint64_t part = is_of_objects(call) ? PC_PART_OBJECTS : PC_PART_UNEVEN;
    pc_sign_part(round, part << 32 | call->salt, 2, said);
    round->ndim = 0; /* that is no shape */
    return 0;
}

static const unsigned char *row_of(const struct pc_uneven *call, int rank) {
    if (call->rows != NULL)
        return call->rows + (size_t)rank * call->row_nbytes;
    size_t begin = pc_uneven_gathers(call) ? 0 : (size_t)call->comm->rank * call->row_nbytes;
    return pc_slot_of(call->comm, rank, call->comm->number)->data + begin;
}

/* Say what this rank's blocks are, and read what the others' are, unless that is done. -1 with an
   exception. */
int pc_uneven_first(struct pc_uneven *call) {
    pc_comm *comm = call->comm;
    if (!comm->heard) {
        pc_collective round;
        if (begin(call, &round, FIRST) < 0)
            return -1;
        int status = pc_uneven_has_long_rows(call) ? exchange_long(call, &round)
                                         : exchange_slots(call, &round);
        if (pc_call_end_with(&round, status, Py_None) == NULL)
            return -1;
        Py_DECREF(Py_None);
    }
    comm->heard = false;
    bool is_taken = takes(call);
    for (int rank = 0; rank < comm->size; rank++) {
        if (!hears(call, rank))
            continue;
        const unsigned char *row = row_of(call, rank);
        struct front front;
        uint32_t length;
        memcpy(&front, row, sizeof front);
        call->left = front.left > call->left ? front.left : call->left;
        if (!is_taken || front.left == PC_LONG_HEADS)
            continue;
        struct pc_block *block = &call->blocks[call->num_blocks++];
        block->rank = rank;
        block->address = front.address;
        block->head = row + sizeof front;
        memcpy(&length, block->head, 4);
        block->head_nbytes = 4 + length;
        block->elements = block->head + pc_round_up(block->head_nbytes, PC_BLOCK_ALIGNMENT);
        block->room = call->row_nbytes - (size_t)(block->elements - row);
        block->place.data = block->place.held.obj = NULL;
    }
    return 0;
}

size_t pc_uneven_object_nbytes(const struct pc_block *block) {
    uint64_t nbytes;
    memcpy(&nbytes, block->head + 4, sizeof nbytes);
    return nbytes;
}

/* --- the second round ------------------------------------------------------------------------- */

/* Copy what is here, and note what must be read from the others' memory; how much that is. */
static size_t fill(const struct pc_uneven *call, struct pc_piece *pieces) {
    size_t count = 0;
    for (int index = 0; index < call->num_blocks; index++) {
        const struct pc_block *block = &call->blocks[index];
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
int pc_uneven_second(const struct pc_uneven *call, int status) {
    struct pc_piece pieces[call->comm->size];
    pc_collective round;
    size_t count = status == 0 ? fill(call, pieces) : 0;
    if (call->left == PC_NOTHING_LEFT)
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

void pc_uneven_release(const struct pc_uneven *call) {
    for (int index = 0; index < call->num_given; index++)
        pc_memory_release(&call->given[index].array);
    for (int index = 0; index < call->num_blocks; index++)
        pc_memory_release(&call->blocks[index].place);
    PyMem_Free(call->rows);
}

/* --- calls from Python, whose arguments are checked ------------------------------------------- */

/* Ask Python where the blocks go. -1 with an exception. */
static int find_places(const struct pc_uneven *call, PyObject *places) {
    PyObject *heads = PyList_New(call->num_blocks), *found = NULL;
    for (int index = 0; heads != NULL && index < call->num_blocks; index++) {
        const struct pc_block *block = &call->blocks[index];
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
    struct pc_given given[comm->size];
    struct pc_block blocks[comm->size];
    if (!PyArg_ParseTuple(args, "iiKiO!O", &method, &dtype, &salt, &root, &PyList_Type, &items,
                          &places) ||
        pc_check_attached(comm) < 0)
        return NULL;
    struct pc_uneven call = pc_uneven(comm, method, root, given, blocks);
    call.dtype = dtype;
    call.salt = salt;
    for (; call.num_given < PyList_Size(items); call.num_given++) {
        struct pc_given *each = &given[call.num_given];
        if (!PyArg_ParseTuple(PyList_GetItem(items, call.num_given), "y#y*", &each->head,
                              &each->head_nbytes, &each->array.held))
            break;
        each->array.data = each->array.held.buf;
        each->array.nbytes = (size_t)each->array.held.len;
    }
    if (!PyErr_Occurred() && pc_uneven_first(&call) == 0) {
        bool by_messages =
            call.left == PC_LONG_HEADS || (call.left != PC_NOTHING_LEFT && !comm->direct);
        if (by_messages ||
            pc_uneven_second(&call, call.num_blocks > 0 ? find_places(&call, places) : 0) == 0)
            result = PyBool_FromLong(by_messages);
    }
    pc_uneven_release(&call);
    return result;
}
