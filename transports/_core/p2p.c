/* send and recv of NumPy arrays between ranks of one host: arguments are looked at, not converted. Whatever is
   not the common case, or takes long, is handed with the same arguments to the Python methods; on the wire
   there is no difference.

   A receive looks at the next item of its source's ring. If that is the array it wants it takes it; if not it
   leaves everything as it is, and Python sorts it out. A send that has to wait for its receiver looks at the
   transfer for a while, and helps to copy, before it becomes an operation of the engine.

   A message that could be buffered is offered all the same if it is not small and its receiver waits for it already:
   copying it once is quicker than twice. If the receiver turns out to wait for another one, it is buffered after
   all. */
#include "p2p.h"

#include "p2p_call.h"
#include "views.h"

#include <sched.h>
#include <stdlib.h>
#include <structmember.h>

/* Yields before the interpreter's lock is given up, so that a short wait does not pay for that, and between
   looks at the clock. */
#define YIELDS_WITH_LOCK 16
#define YIELDS_A_LOOK 16
/* Looks at what another rank is doing right now, between yields. */
#define LOOKS_A_YIELD 256
/* A peer that is so late has something else to do: let the engine wait. */
#define PATIENCE_NS 1000000u

/* Bytes from which copying once is quicker: 48 KiB take 4.5 us against 6.3. */
#define COPY_ONCE_NBYTES ((size_t)32 << 10)
/* The same for an array that the receiver has mapped; and how long its receiver may take to come for it, which is less
   than what is saved. */
#define SHARED_ONCE_NBYTES ((size_t)8 << 10)
#define COMES_NS 2000u
#define BRIEF_NBYTES ((size_t)128 << 10)

/* --- where it goes ---------------------------------------------------------------------------------- */

static inline bool is_open(pc_p2p *p2p) {
    pc_channel *channel = &p2p->channel->channel;
    return p2p->usable && !p2p->channel->away && !channel->closed && channel->backlogged == 0 &&
           !channel->host->engaged && !pc_host_failed(channel->host);
}

/* The local rank of a peer that can be reached, or -1. */
static inline int find_peer(pc_p2p *p2p, PyObject *value) {
    long rank = small_int(value, 0, -1);
    if (rank < 0 || rank >= p2p->size || p2p->local[rank] < 0 || p2p->channel->channel.peers[p2p->local[rank]].dead)
        return -1;
    return p2p->local[rank];
}

/* Whether another thread waits for this one, which has given up the interpreter's lock. */
static inline bool is_wanted(const pc_channel *channel) {
    return atomic_load(&((pc_channel_object *)channel->owner)->wanted) > 0;
}

/* --- sending ----------------------------------------------------------------------------------------- */

static inline bool is_awaited(pc_channel *channel, int rank) {
    return pc_load(&channel->peers[rank].desk->awaited) == (uint64_t)channel->rank + 1;
}

/* Whether it is worth while to have the receiver copy an array that could be buffered: it waits for it, or comes at
   once. */
static bool rather_once(pc_channel *channel, int rank, const struct pc_array *x) {
    bool shared = pc_arena_has(x->data, x->nbytes);
    if (x->nbytes <= (shared ? SHARED_ONCE_NBYTES : COPY_ONCE_NBYTES) || x->nbytes > channel->eager_limit)
        return false;
    if (is_awaited(channel, rank) || !shared || channel->host->spins == 0)
        return is_awaited(channel, rank);
    uint64_t started = pc_now_ns();
    do {
        pc_relax();
        if (is_awaited(channel, rank))
            return true;
    } while (pc_now_ns() - started < COMES_NS);
    return false;
}

/* Wait until an offered message is taken by its receiver, which is looking for it; false: it is not, and never
   will be. */
static bool taken_soon(pc_channel *channel, struct pc_channel_send *send) {
    struct pc_transfer *transfer = pc_transfer_of(channel->heap.base, send->transfer);
    uint64_t waiting = pc_phase_of(send->id, PC_PHASE_WAITING), started = pc_now_ns();
    for (unsigned looks = 1; pc_load(&transfer->state) == waiting; looks++) {
        if (looks % LOOKS_A_YIELD != 0) {
            pc_relax();
            continue;
        }
        sched_yield(); /* its receiver may need this core */
        if (!is_awaited(channel, send->peer) || pc_now_ns() - started > PATIENCE_NS)
            return !pc_transfer_step(transfer, send->id, PC_PHASE_WAITING, PC_PHASE_WITHDRAWN);
    }
    return true;
}

/* Whether a payload is copied in less time than it takes to give up the interpreter's lock and get it back. */
static bool is_brief(const struct iovec *payload, uint64_t pieces) {
    return pieces <= 1 || (payload->iov_len <= BRIEF_NBYTES && pc_arena_has(payload->iov_base, payload->iov_len));
}

/* Look at an offered message until its receiver has it; false: it is late. */
static bool watch(pc_channel *channel, struct pc_channel_send *send) {
    pc_host *host = channel->host;
    struct pc_transfer *transfer = pc_transfer_of(channel->heap.base, send->transfer);
    uint64_t done = pc_phase_of(send->id, PC_PHASE_DONE);
    bool helps = true;
    for (int spins = is_brief(&send->one, send->pieces) ? host->spins : 0; spins > 0; spins--) {
        if (pc_load(&transfer->state) == done)
            return true;
        if (helps && pc_load(&transfer->next) < send->pieces)
            helps = pc_channel_send_help(channel, send, PC_BUDGET);
        else
            pc_relax();
    }
    pc_channel_leave(channel);
    uint64_t started = pc_now_ns();
    unsigned looks = 0;
    bool finished;
    while (!(finished = pc_load(&transfer->state) == done)) {
        if (helps && pc_load(&transfer->next) < send->pieces) {
            if (send->pieces > 1)
                helps = pc_channel_send_help(channel, send, PC_BUDGET);
            started = pc_now_ns();
            continue;
        }
        if (looks++ < (unsigned)host->spins) {
            pc_relax();
            continue;
        }
        sched_yield();
        if (looks % YIELDS_A_LOOK == 0 && (pc_now_ns() - started > PATIENCE_NS || pc_host_failed(host) ||
                                           is_wanted(channel)))
            break;
    }
    pc_channel_return(channel);
    return finished;
}

/* Whether the receiver can copy the array from where it is. */
static bool can_be_fetched(pc_channel *channel, int rank, const struct pc_array *x) {
    return pc_channel_reaches(channel, rank) || pc_arena_has(x->data, x->nbytes);
}

/* Offer an array, and look at it for a while. 1: it is received, 0: it is late, -1 with an exception. With `soon`
   it must be taken at once; 2: it was not, and has been taken back. */
static int offer(pc_channel *channel, int rank, PyObject *x_object, const struct pc_array *x, const void *header,
                 size_t header_nbytes, bool soon, uint64_t *id) {
    struct pc_views *owner = pc_view_nothing(x_object);
    if (owner == NULL)
        return -1;
    struct pc_channel_send *send = calloc(1, sizeof *send);
    if (send == NULL) {
        pc_views_release(owner);
        PyErr_NoMemory();
        return -1;
    }
    send->peer = rank;
    send->nbytes = x->nbytes;
    send->one = (struct iovec){x->data, x->nbytes};
    send->parts = (struct pc_parts){&send->one, x->nbytes > 0};
    send->owner = owner;
    send->watched = channel->num_free_transfers > 0 && can_be_fetched(channel, rank, x);
    *id = pc_channel_offer(channel, send, header, header_nbytes);
    if (*id == 0) {
        PyErr_NoMemory();
        return -1;
    }
    if (soon && !taken_soon(channel, send)) {
        pc_channel_send_give_up(channel, send);
        return 2;
    }
    if (!send->watched || (!watch(channel, send) && !pc_channel_send_unwatch(channel, send)))
        return 0;
    pc_channel_send_end(channel, send, true);
    return 1;
}

static PyObject *send_array(pc_p2p *p2p, PyObject **values, const struct pc_array *x, int rank, long tag) {
    pc_channel *channel = &p2p->channel->channel;
    unsigned char header[LONGEST_HEADER_NBYTES];
    size_t header_nbytes = write_header(p2p->ident, x, tag, header);
    struct iovec memory = {x->data, x->nbytes};
    uint64_t id;
    int status = 2;
    if (PC_UNLIKELY(x->nbytes > SHARED_ONCE_NBYTES) && rather_once(channel, rank, x) &&
        channel->num_free_transfers > 0 && can_be_fetched(channel, rank, x))
        status = offer(channel, rank, values[X], x, header, header_nbytes, true, &id);
    if (status == 2) {
        if (PC_LIKELY(pc_channel_post(channel, rank, header, header_nbytes, (struct pc_parts){&memory, 1}, x->nbytes)))
            return Py_NewRef(Py_None);
        status = offer(channel, rank, values[X], x, header, header_nbytes, false, &id);
    }
    if (status < 0)
        return NULL;
    if (status == 0)
        return PyObject_CallFunction(p2p->finish_send, "OK", values[DEST], (unsigned long long)id);
    return Py_NewRef(Py_None);
}

static PyObject *p2p_send(pc_p2p *p2p, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array x;
    if (PC_LIKELY(is_open(p2p)) && parse(send_order, args, count, keywords, values) && values[X] != NULL &&
        values[SOURCE] == NULL && values[OUT] == NULL && values[STATUS] == NULL && is_none(values[TIMEOUT]) &&
        pc_array_view(values[X], &x) && x.ndim <= MAX_DIMS) {
        pc_channel *channel = &p2p->channel->channel;
        int rank = find_peer(p2p, values[DEST]);
        long tag = values[TAG] == NULL ? 0 : small_int(values[TAG], 0, -1);
        if (rank >= 0 && tag >= 0 && pc_load(&channel->peers[rank].desk->closed) == 0)
            return send_array(p2p, values, &x, rank, tag);
    }
    return pc_call_slow(p2p->slow_send, args, count, keywords);
}

/* --- receiving --------------------------------------------------------------------------------------- */

/* Wait for the next item from a rank, a little. As `pc_ring_peek`; 0: it is late. */
static int64_t await_item(pc_channel *channel, struct pc_ring *ring, struct pc_item **item) {
    pc_host *host = channel->host;
    int64_t nbytes = 0;
    for (int spins = host->spins; nbytes == 0 && spins > 0; spins--) {
        pc_relax();
        nbytes = pc_ring_peek(ring, item);
    }
    for (int yields = 0; nbytes == 0 && yields < YIELDS_WITH_LOCK; yields++) {
        sched_yield();
        nbytes = pc_ring_peek(ring, item);
    }
    if (nbytes != 0)
        return nbytes;
    pc_channel_leave(channel);
    uint64_t started = pc_now_ns();
    for (unsigned yields = 1; (nbytes = pc_ring_peek(ring, item)) == 0; yields++) {
        sched_yield();
        if (yields % YIELDS_A_LOOK == 0 && (pc_now_ns() - started > PATIENCE_NS || pc_host_failed(host) ||
                                            is_wanted(channel)))
            break;
    }
    pc_channel_return(channel);
    return nbytes;
}

/* Whether a header is that of the array that is wanted, and `nbytes` of it fit. */
static bool matches(const pc_p2p *p2p, const unsigned char *header, size_t header_nbytes, size_t nbytes, int64_t tag,
                    const struct pc_array *out) {
    uint64_t ident;
    int64_t theirs;
    if (header_nbytes < HEADER_NBYTES + DESCRIPTION_NBYTES || header[0] != KIND_P2P || header[17] != 0)
        return false;
    memcpy(&ident, header + 1, 8);
    memcpy(&theirs, header + 9, 8);
    return ident == p2p->ident && (tag == ANY || tag == theirs) && header[18] == out->dtype &&
           header[19] == sizeof KIND_NAME && memcmp(header + 21, KIND_NAME, sizeof KIND_NAME) == 0 &&
           header_nbytes == HEADER_NBYTES + DESCRIPTION_NBYTES + 8 * (size_t)header[20] && nbytes <= out->nbytes;
}

/* Have an offered array copied to `out`; false: leave it to Python. */
static bool take(pc_channel *channel, int rank, const struct pc_offer *offer, const struct pc_array *out) {
    if (offer->transfer < 0 || offer->transfer >= PC_TRANSFERS || offer->num_parts != 1 ||
        !pc_channel_can_fetch(channel, rank, offer->address, offer->nbytes))
        return false;
    struct pc_transfer *transfer = pc_transfer_of(channel->peers[rank].heap, offer->transfer);
    if (!pc_transfer_step(transfer, offer->id, PC_PHASE_WAITING, PC_PHASE_TAKEN))
        return false;
    struct pc_channel_receive receive = {
        .id = offer->id,
        .peer = rank,
        .mode = PC_COPYING,
        .nbytes = offer->nbytes,
        .into = out->data,
        .one = {(void *)(uintptr_t)offer->address, offer->nbytes},
        .parts = {&receive.one, 1},
        .transfer = transfer,
        .pieces = pc_pieces(offer->nbytes),
    };
    enum pc_outcome outcome = PC_TOO_LATE;
    if (pc_transfer_open(transfer, (uint64_t)(uintptr_t)out->data, 0)) {
        bool left = false;
        const void *here = receive.nbytes <= BRIEF_NBYTES
                               ? pc_reach_here(channel->host, rank, offer->address, offer->nbytes)
                               : NULL;
        if (receive.pieces > 1) {
            if (pc_load(&transfer->watched) == 0)
                pc_channel_tell(channel, rank, PC_TAKE, offer->id); /* without memory nobody helps */
            left = here == NULL;
            if (left)
                pc_channel_leave(channel);
        }
        do {
            outcome = pc_channel_receive_copy(channel, &receive, SIZE_MAX);
            if (outcome == PC_WAITS) {
                sched_yield();
                if (pc_host_failed(channel->host) && pc_process_ended(channel->peers[rank].pid))
                    outcome = PC_GONE;
            }
        } while (outcome == PC_WAITS);
        if (left)
            pc_channel_return(channel);
    }
    if (outcome == PC_COMPLETE) {
        pc_channel_receive_finish(channel, &receive, true);
        return true;
    }
    pc_channel_receive_settle(channel, &receive);
    if (outcome == PC_TOO_LATE || !pc_transfer_untake(transfer, offer->id))
        pc_channel_receive_finish(channel, &receive, false);
    return false;
}

/* Copy a payload from a block that may still be being filled; false: that takes too long. */
static bool empty(pc_channel *channel, unsigned char *block, unsigned char *into, size_t nbytes) {
    struct pc_filling *filling = (struct pc_filling *)block;
    uint64_t started = 0;
    size_t done = 0;
    for (unsigned looks = 1; done < nbytes; looks++) {
        size_t filled = pc_load(&filling->nbytes);
        if (filled > done) {
            filled = filled < nbytes ? filled : nbytes;
            pc_copy(into + done, block + sizeof *filling + done, filled - done);
            done = filled;
        } else if (looks % LOOKS_A_YIELD != 0) {
            pc_relax();
        } else { /* its writer may have lost its core, or its life */
            sched_yield();
            uint64_t now = pc_now_ns();
            if (started == 0)
                started = now;
            if (now - started > PATIENCE_NS || pc_host_failed(channel->host))
                return false;
        }
    }
    return true;
}

/* Take the array of an item if it is the one that is wanted; false: leave it to Python. */
static bool take_item(pc_p2p *p2p, int rank, struct pc_item *item, size_t room, int64_t tag,
                      const struct pc_array *out) {
    pc_channel *channel = &p2p->channel->channel;
    size_t header_nbytes = pc_item_header(item), nbytes = item->nbytes;
    uint32_t kind = pc_item_kind(item);
    if (PC_LIKELY(kind == PC_EAGER)) {
        if (header_nbytes + nbytes > room || !matches(p2p, item->body, header_nbytes, nbytes, tag, out))
            return false;
        memcpy(out->data, item->body + header_nbytes, nbytes);
        pc_channel_use(channel, rank, nbytes);
        return true;
    }
    if (kind == PC_EAGER_HEAP) {
        struct pc_block block;
        memcpy(&block, item->body, sizeof block);
        if (header_nbytes + sizeof block > room || !pc_block_valid(&block, sizeof(struct pc_filling) + nbytes) ||
            !matches(p2p, item->body + sizeof block, header_nbytes, nbytes, tag, out))
            return false;
        unsigned char *heap = channel->peers[rank].heap;
        if (!empty(channel, pc_heap_at(heap, block.unit), out->data, nbytes))
            return false;
        pc_block_give_back(heap, &block);
        pc_channel_use(channel, rank, nbytes);
        return true;
    }
    if (kind == PC_READY) {
        struct pc_offer offer;
        memcpy(&offer, item->body, sizeof offer);
        return header_nbytes + sizeof offer <= room && offer.nbytes <= out->nbytes &&
               matches(p2p, item->body + sizeof offer, header_nbytes, offer.nbytes, tag, out) &&
               take(channel, rank, &offer, out);
    }
    return false;
}

static PyObject *p2p_recv(pc_p2p *p2p, PyObject *const *args, Py_ssize_t count, PyObject *keywords) {
    PyObject *values[ARGUMENTS] = {NULL};
    struct pc_array out;
    if (PC_LIKELY(is_open(p2p)) && p2p->queued == 0 && parse(recv_order, args, count, keywords, values) &&
        values[X] == NULL && values[DEST] == NULL && is_none(values[STATUS]) && is_none(values[TIMEOUT]) &&
        !is_none(values[OUT]) && pc_array_view(values[OUT], &out) && out.writeable) {
        int rank = find_peer(p2p, values[SOURCE]);
        long tag = values[TAG] == NULL ? ANY : small_int(values[TAG], ANY, -2);
        if (rank >= 0 && tag >= ANY) {
            pc_channel *channel = &p2p->channel->channel;
            struct pc_ring *ring = &channel->peers[rank].in;
            struct pc_item *item;
            int64_t nbytes = pc_ring_peek(ring, &item);
            bool waited = nbytes == 0;
            pc_flag64 *awaited = &channel->peers[channel->rank].desk->awaited;
            if (waited) {
                atomic_store_explicit(awaited, (uint64_t)rank + 1, memory_order_relaxed);
                nbytes = await_item(channel, ring, &item);
            }
            bool taken = nbytes > 0 && take_item(p2p, rank, item, (size_t)nbytes - PC_ITEM_NBYTES, tag, &out);
            if (waited) /* now: what was not taken never will be */
                atomic_store_explicit(awaited, 0, memory_order_release);
            if (PC_LIKELY(taken)) {
                if (PC_UNLIKELY(pc_ring_consume(ring, nbytes)))
                    pc_host_wake(channel->host, rank);
                return Py_NewRef(values[OUT]);
            }
        }
    }
    return pc_call_slow(p2p->slow_recv, args, count, keywords);
}

/* --- the Python type --------------------------------------------------------------------------------- */

static PyObject *p2p_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keywords[] = {"channel", "ident", "locals", "slow_send", "slow_recv", "finish_send", NULL};
    PyObject *channel, *locals, *slow_send, *slow_recv, *finish_send;
    unsigned long long ident;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OKOOOO", keywords, &channel, &ident, &locals, &slow_send,
                                     &slow_recv, &finish_send))
        return NULL;
    if (!pc_is_channel(channel)) {
        PyErr_SetString(PyExc_TypeError, "channel must be a Channel");
        return NULL;
    }
    Py_ssize_t size = PySequence_Size(locals);
    if (size < 0)
        return NULL;
    pc_p2p *p2p = (pc_p2p *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (p2p == NULL)
        return NULL;
    p2p->channel = (pc_channel_object *)Py_NewRef(channel);
    p2p->ident = ident;
    p2p->size = (int)size;
    p2p->slow_send = Py_NewRef(slow_send);
    p2p->slow_recv = Py_NewRef(slow_recv);
    p2p->finish_send = Py_NewRef(finish_send);
    p2p->local = calloc((size_t)size + 1, sizeof *p2p->local);
    if (p2p->local == NULL) {
        PyErr_NoMemory();
        goto failed;
    }
    for (Py_ssize_t index = 0; index < size; index++) {
        PyObject *item = PySequence_GetItem(locals, index);
        long local = item != NULL ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred())
            goto failed;
        bool other = local >= 0 && local < p2p->channel->channel.size && local != p2p->channel->channel.rank;
        p2p->local[index] = other ? (int)local : -1;
    }
    return (PyObject *)p2p;
failed:
    Py_DECREF(p2p);
    return NULL;
}

static int p2p_traverse(pc_p2p *p2p, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)p2p));
    Py_VISIT(p2p->slow_send);
    Py_VISIT(p2p->slow_recv);
    Py_VISIT(p2p->finish_send);
    return 0;
}

static int p2p_clear(pc_p2p *p2p) {
    p2p->usable = 0;
    Py_CLEAR(p2p->slow_send);
    Py_CLEAR(p2p->slow_recv);
    Py_CLEAR(p2p->finish_send);
    return 0;
}

static void p2p_dealloc(pc_p2p *p2p) {
    PyTypeObject *type = Py_TYPE((PyObject *)p2p);
    PyObject_GC_UnTrack(p2p);
    p2p_clear(p2p);
    Py_XDECREF((PyObject *)p2p->channel);
    free(p2p->local);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(p2p);
    Py_DECREF(type);
}

static PyMethodDef p2p_methods[] = {
    {"send", (PyCFunction)(void (*)(void))p2p_send, METH_FASTCALL | METH_KEYWORDS,
     "send(x, dest, tag=0, *, timeout=None)\n--\n\nSend `x` to rank `dest`; see `pycoll.Communicator.send`."},
    {"recv", (PyCFunction)(void (*)(void))p2p_recv, METH_FASTCALL | METH_KEYWORDS,
     "recv(source=-1, tag=-1, out=None, status=None, *, timeout=None)\n--\n\n"
     "Receive a message and return its value; see `pycoll.Communicator.recv`."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef p2p_members[] = {
    {"usable", T_BOOL, offsetof(pc_p2p, usable), 0,
     "Whether the short way may be taken: the communicator is open and whole, and calls have no default deadline."},
    {"queued", T_INT, offsetof(pc_p2p, queued), 0,
     "Messages that have come for this communicator, and receives that wait: while there are any, recv is Python's."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot p2p_slots[] = {
    {Py_tp_new, p2p_new},
    {Py_tp_dealloc, p2p_dealloc},
    {Py_tp_traverse, p2p_traverse},
    {Py_tp_clear, p2p_clear},
    {Py_tp_methods, p2p_methods},
    {Py_tp_members, p2p_members},
    {Py_tp_doc,
     "PointToPoint(channel, ident, locals, slow_send, slow_recv, finish_send)\n\n"
     "send and recv of one communicator; `locals` are the ranks on this host, by rank, -1 for others. What is not "
     "the common case goes to `slow_send` and `slow_recv` with the same arguments; a send that takes long to "
     "`finish_send(dest, id)`, which waits for the offer of that id."},
    {0, NULL},
};

PyType_Spec pc_p2p_spec = {
    .name = "pycoll.transports._core.PointToPoint",
    .basicsize = sizeof(pc_p2p),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = p2p_slots,
};
