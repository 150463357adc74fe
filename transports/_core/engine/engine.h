/* The message engine of one rank: communicators (here *contexts*), the messages that have come for
   them, and the receives and sends that are under way.

   A message of a collective has an address instead: its call, by number, and where it belongs in
   that call. It also brings the call as text, so that ranks which have made different calls find
   out: such a message goes to the caller.

   Ranks are world ranks. The memory of receives and sends is the caller's; that of contexts and
   messages is the engine's. Nothing here locks: the caller holds the engine's lock for everything.

   What ends is told by a callback, after all that the call had to do is done: a callback may call
   the engine. Callbacks come in the order in which things have ended, one after the other. */
#ifndef PC_ENGINE_H
#define PC_ENGINE_H

#include "address.h"
#include "base/core.h"
#include "link.h"
#include "match.h"
#include "host/noted.h"
#include "scratch.h"
#include "host/tally.h"

/* A status is 0, a negative errno of a link, one of these, or what the caller has given to
   `pc_context_break` or `pc_engine_forget`, which is positive. */
enum {
    PC_REFUSED = -100001, /* the message does not fit the receive, and is where it was */
    PC_CONTEXT_CLOSED = -100002,  /* the context was closed */
    PC_NO_VALUE = -100004, /* of a run: a step reads a chunk that has no value */
    PC_STOPPED = -100005, /* a send was stopped before it could end */
    /* the sender has taken back the message that an asking receive had */
    PC_TAKEN_BACK = -100003,
};

/* Closed contexts that are remembered: messages that come too late for them are dropped. */
#ifndef PC_CLOSED_IDENTS
#define PC_CLOSED_IDENTS 4096
#endif
/* Messages for contexts that are not open yet. */
#ifndef PC_MOST_UNOPENED
#define PC_MOST_UNOPENED 65536
#endif
/* A header of this length or less needs no memory of its own. */
#ifndef PC_SHORT_HEADER
#define PC_SHORT_HEADER 160
#endif
/* Calls that have ended and are remembered, to name them when a message comes for one of them. */
#define PC_LAST_CALLS 16

/* Header of a point-to-point message, little-endian: kind u8, context u64, tag i64, form u8; then
   the description. */
enum { PC_KIND_P2P = 1, PC_FORM_AT = 17, PC_P2P_NBYTES = 18 };
/* Header of a message of a collective: kind u8, context u64, call u32, subcall u16, index u32; then
   the call as text. Of one that is offered there is an offer before that. */
enum {
    PC_KIND_COLLECTIVE = 2,
    PC_KIND_OFFERED = 4,
    PC_COLLECTIVE_NBYTES = 19,
    PC_OFFER_NBYTES = 88
};
void pc_p2p_header(unsigned char header[PC_P2P_NBYTES], uint64_t ident, int64_t tag,
                   unsigned char form);

/* --- messages --------------------------------------------------------------------------------- */

enum pc_message_state {
    PC_MESSAGE_PASSING, /* in `passing`, until `pc_arrived` returns */
    PC_MESSAGE_WAITS,   /* it was not accepted yet */
    PC_MESSAGE_READING, /* to the memory of its receive, or to `spare` */
    PC_MESSAGE_HERE,    /* at `payload`: memory of the link, or `spare` */
};

struct pc_message_list {
    struct pc_message *first, **last;
};

struct pc_message {
    struct pc_unexpected match; /* the first member; its source is the peer */
    struct pc_addressed address; /* of a collective's: it has come early */
    struct pc_link *link;
    uint64_t token[4]; /* the link's own */
    size_t nbytes;
    unsigned char *header;
    size_t header_nbytes;
    enum pc_message_state state;
    bool sender_waits;
    const struct pc_incoming *passing;
    const unsigned char *payload;
    unsigned char *spare;       /* of ours: freed with the message */
    struct pc_context *context; /* NULL: none that is open and works */
    struct pc_receive *taker;   /* holds it, or has it read */
    struct pc_keeper keeper;    /* of the memory that it is written to: as of the receive */
    /* It stands in a list if a receive has taken it, or if it has no context. */
    struct pc_message_list *list;
    struct pc_message *next, **at;
    unsigned char short_header[PC_SHORT_HEADER];
};

/* --- receives --------------------------------------------------------------------------------- */

enum pc_receive_state {
    PC_RECEIVE_IDLE,    /* the caller's: not started, or given up */
    PC_RECEIVE_POSTED,  /* it waits for a message */
    /* it asks: `message` has come for it, and the caller says what becomes of it */
    PC_RECEIVE_HELD,
    PC_RECEIVE_READING, /* its message is being read */
    PC_RECEIVE_ENDED,
};

/* A receive, or a probe. The caller sets the first block, and all else to zero. */
struct pc_receive {
    struct pc_posted posted; /* the first member: source, tag, and peek for a probe */
    struct pc_addressed address; /* or for a collective's message: call, subcall, sender, index */
    bool by_address;         /* so; without `ask` the message must have just `room` bytes, */
    bool takes_less;         /* or that many at most */
    bool ask;                /* what fits is held; else it is written to `into` at once */
    bool takes_offered;         /* by address, without `ask`: a message that is offered is held */
    void *into;
    struct pc_keeper keeper; /* of `into` */
    size_t room;
    /* with what the header must go on from its form: the caller's, until it has ended */
    const void *expects;
    size_t expects_nbytes; /* 0: any will do, and if it asks, any length */
    /* It is held or has ended. The latter is the last that is done with it. */
    void (*notify)(struct pc_receive *receive);
    void *owner; /* up to the caller */

    enum pc_receive_state state;
    /* When it has ended. */
    int status, source;
    int64_t tag;
    size_t nbytes;
    /* Of a probe, and of a receive that was refused: a copy, to be freed by the caller; NULL: there
       was no memory. */
    unsigned char *header;
    size_t header_nbytes;

    uint64_t noted; /* see `pc_note_message` */
    struct pc_context *context;
    struct pc_message *message;
    struct pc_ending ending;
};

/* --- contexts --------------------------------------------------------------------------------- */

/* A collective call: a text that says what it is, and after a zero byte where it was made, which
   may differ. */
struct pc_called {
    uint64_t number;
    struct pc_noted_call *noted; /* or NULL */
    size_t nbytes, signature_nbytes; /* all of the text; of what must be the same on all ranks */
    struct pc_chained by_number;
    unsigned char text[];
};

/* What one communicator has exchanged with one rank: messages, and the bytes of their payloads. A
   message counts when its send, or its receive, has ended well. */
struct pc_counts {
    uint64_t sent_nbytes, num_sent, received_nbytes, num_received;
};

struct pc_context {
    struct pc_engine *engine;
    /* who has opened it, until it is closed, and its runs: it is freed after the last one */
    size_t num_users;
    uint64_t ident;
    int me;
    int *members;
    size_t num_members;
    struct pc_counts *counts; /* by world rank; NULL for the one of other kinds */
    int broken; /* a status */
    struct pc_matching matching;
    struct pc_message_list taken;
    struct pc_send *sends; /* that are under way */
    struct pc_addresses addresses;
    uint64_t next_call;
    struct pc_chains calls; /* that have begun */
    struct pc_called *last_calls[PC_LAST_CALLS]; /* that have ended: a ring */
    uint64_t num_ended;
    struct pc_called *newest; /* the one begun last, if the ring has it no more */
    struct pc_chained by_ident;
    struct pc_context *next, **at;
};

/* Messages for a context that is not open. */
struct pc_unopened {
    struct pc_message_list messages; /* the first member */
    uint64_t ident;
    struct pc_chained by_ident;
    struct pc_unopened *next, **at;
};

struct pc_left {
    struct pc_left *next;
    void *memory;
};

struct pc_closed {
    uint64_t ident;
    struct pc_chained by_ident;
};

/* The caller sets the first block, and all else to zero. It must stay where it is. */
/* Memory that is used again. */
struct pc_spare {
    struct pc_spare *next;
};

struct pc_engine {
    int size;
    struct pc_link **links; /* by peer; the caller's */
    /* A message of another kind has come, or one of a call that differs: a receive for it, asking,
       which will hold it and is told so; NULL: there is no memory. Without this function only
       point-to-point messages are known. */
    struct pc_receive *(*other)(struct pc_engine *engine, const struct pc_message *message);
    /* messages of collectives are matched here; else they are of another kind */
    bool matches_calls;
    /* What links say of a peer: all that it ever sent has come; or its link is gone. NULL: nobody
       asks. */
    void (*finished)(struct pc_engine *engine, int peer);
    void (*lost)(struct pc_engine *engine, int peer, const char *why);
    void *owner;
    struct pc_tally *tally; /* what it has done; NULL when it is opened: it is to have its own */
    struct pc_notes *notes; /* of what it has called last; NULL: nobody reads them */

    int *gone; /* by peer: a status; 0: it is there */
    /* to which messages of other kinds belong, and their sends: nothing is matched there */
    struct pc_context *others;
    struct pc_context *contexts;
    struct pc_chains by_ident, unopened, by_closed;
    struct pc_closed *closed; /* a ring */
    uint64_t num_closed;
    struct pc_unopened *first_unopened;
    size_t num_unopened; /* messages */
    struct pc_message_list abandoned; /* they wait at their senders, and are not answered */
    struct pc_message *free_messages;
    size_t num_messages; /* that are used */
    struct pc_message *arriving;
    int depth;
    bool telling;
    size_t num_unsettled; /* promises about memory that links have made and not kept yet */
    struct pc_left *left; /* scratch that is given back then */
    struct pc_scratch scratch;
    struct pc_spare *spare_moves; /* of runs, for the next ones */
    uint32_t num_spare_moves;
    struct pc_ending *endings, **last_ending; /* to be told */
    struct pc_tally own_tally;
};

/* 0, or -ENOMEM. */
int pc_engine_open(struct pc_engine *engine);
/* The links are closed, and so are all contexts; of other messages and their sends nothing is under
   way. */
void pc_engine_free(struct pc_engine *engine);
/* A peer has ended, for the reason `status`. What waits for it fails; messages of it that are here
   may still be received. */
void pc_engine_forget(struct pc_engine *engine, int peer, int status);

/* The open context to which a message belongs that is point to point or a collective's; NULL: there
   is none, or it is of another kind. */
struct pc_context *pc_context_of(const struct pc_engine *engine, const void *header,
                                 size_t header_nbytes);
/* Open a context, which is not open and was not closed; messages that have come for it are handed
   over. NULL: there is no memory. */
struct pc_context *pc_context_open(struct pc_engine *engine, uint64_t ident, const int *members,
                                   size_t num_members, int me);
/* End all that is under way with `status`, and so what is started later; drop what has come. */
void pc_context_break(struct pc_context *context, int status);
/* The same with PC_CONTEXT_CLOSED, if it is not broken; and free it. */
void pc_context_close(struct pc_context *context);

/* Start a receive or a probe. Its state says what has become of it; if it is held or has ended
   `told` is called, too, as it is later. A receive whose message is taken back waits again, in its
   place; one that asks ends with PC_TAKEN_BACK. */
void pc_receive_start(struct pc_context *context, struct pc_receive *receive);
/* The same in the place of an earlier one: its `posted.queued.number`. */
void pc_receive_start_at(struct pc_context *context, struct pc_receive *receive, uint64_t number);
/* Have the message that a receive holds written to `into`. 0, or a negative errno of its link: it
   holds it still. */
int pc_receive_into(struct pc_receive *receive, void *into);
/* Have one whose message is being read go on elsewhere; what is there already is copied. It may end
   at once. */
void pc_receive_redirect(struct pc_receive *receive, void *into);
/* Give up: it does not end, and nothing is written any more. A message that it has goes back to its
   place. False: it has ended, or it goes on for want of memory, as its state says. */
bool pc_receive_give_up(struct pc_receive *receive);
/* Have a receive that was not started hold the message that another one holds, which is idle then.
   It is told. */
void pc_receive_take_over(struct pc_receive *receive, struct pc_receive *from);
/* Give up an asking receive that has a message, which nobody wants: it does not end. */
void pc_receive_drop(struct pc_receive *receive);
/* Count the message that a receive holds: its owner has read the value where the sender has it. */
void pc_receive_count(const struct pc_receive *receive);

/* Begin a collective call: those of the same number belong together on all ranks. NULL: there is no
   memory. */
struct pc_called *pc_context_begin(struct pc_context *context, const void *text, size_t nbytes);
/* End a call, for which every message was received. */
void pc_context_end(struct pc_context *context, struct pc_called *call);
/* The call of a number that has begun and not ended; NULL: there is none. */
struct pc_called *pc_call_find(const struct pc_context *context, uint64_t number);
/* The text of the call begun last; NULL: there was none. */
const struct pc_called *pc_call_newest(const struct pc_context *context);
/* As `pc_receive_start`, for one with an address, of which nothing waits for the message yet. */
void pc_collect_start(struct pc_context *context, struct pc_receive *receive);

static inline void pc_count_sent(const struct pc_context *context, int peer, size_t nbytes) {
    struct pc_tally *tally = context->engine->tally;
    tally->messages++;
    tally->nbytes += nbytes;
    context->counts[peer].num_sent++;
    context->counts[peer].sent_nbytes += nbytes;
}
static inline void pc_count_received(const struct pc_context *context, int peer, size_t nbytes) {
    context->counts[peer].num_received++;
    context->counts[peer].received_nbytes += nbytes;
}

/* Start a send. PC_UNDER_WAY; PC_SENT: it has ended already, with its `status`. */
int pc_send_start(struct pc_context *context, struct pc_send *send, const void *header,
                  size_t header_nbytes, enum pc_way way);
/* Stop a send, to take it back next. False: it is too late, and it goes on, or has ended. */
bool pc_send_stop(struct pc_send *send);
/* Give up a send, stopped or not: it does not end, and its memory is not used any more. False: it
   has ended. */
bool pc_send_take_back(struct pc_send *send);

/* --- for the engine's own files --------------------------------------------------------------- */

/* Around everything that the caller or a link calls: what has ended is told last. */
static inline void pc_engine_enter(struct pc_engine *engine) { engine->depth++; }
void pc_engine_leave(struct pc_engine *engine);

void pc_list_clear(struct pc_message_list *list);
void pc_list_append(struct pc_message_list *list, struct pc_message *message);
void pc_list_remove(struct pc_message *message);

/* Give scratch back that was sent from, or received into: when no link uses it any more. */
void pc_engine_give_scratch(struct pc_engine *engine, void *memory);
/* A link keeps one promise more. */
void pc_engine_settled(struct pc_engine *engine);

/* A message that stands nowhere yet, of a link; NULL: there is no memory. */
struct pc_message *pc_message_new(struct pc_engine *engine, struct pc_link *link,
                                  const struct pc_incoming *in);
/* Copy a payload that is about to pass. False: there is no memory. */
bool pc_message_keep(struct pc_message *message);
/* Free a message that stands nowhere. */
void pc_message_free(struct pc_engine *engine, struct pc_message *message);
/* Drop a message that stands nowhere, and that nobody will receive. */
void pc_message_drop(struct pc_engine *engine, struct pc_message *message, bool answer);

/* A user does not need the context any more. */
void pc_context_let_go(struct pc_context *context);
/* Why no message of a source can come any more; 0: it can. */
int pc_context_no_sender(const struct pc_context *context, int source);
/* A message, or a receive, that stands nowhere waits in its place, or finds what it waits for. */
void pc_context_settle(struct pc_context *context, struct pc_message *message,
                       struct pc_receive *receive);
void pc_context_stop(struct pc_context *context, int status, bool closes);
/* A receive that was not started takes a message that stands nowhere, and is told. */
void pc_receive_hold(struct pc_context *context, struct pc_receive *receive,
                     struct pc_message *message);
/* Have a receive or a send told of its state; or not any more. */
void pc_engine_tell(struct pc_engine *engine, struct pc_ending *ending);
void pc_engine_tell_not(struct pc_engine *engine, struct pc_ending *ending);
/* Whether a receive that has taken a message, which stands nowhere, may have it. If it asks it
   holds it. */
bool pc_receive_fits(const struct pc_receive *receive, const struct pc_message *message);
/* Whether the message that a receive holds is offered. */
bool pc_receive_is_offered(const struct pc_receive *receive);
void pc_receive_couple(struct pc_receive *receive, struct pc_message *message,
                       enum pc_receive_state state);
/* Have a message, which stands nowhere, written to the memory of a receive. One that asks does not
   miss it, but ends. PC_GIVEN_BACK: because of `error`; the receive has not ended. */
enum pc_fetched {
    PC_TAKEN_UP,   /* the receive has it, or has ended with it */
    PC_MISSED,     /* there is no such message any more: the receive waits again */
    PC_GIVEN_BACK, /* the receive does not have it */
};
enum pc_fetched pc_receive_fetch(struct pc_receive *receive, struct pc_message *message,
                                 int *error);

/* calls.c: a collective's message that stands nowhere has come for a context. 0, or a negative
   errno. */
int pc_call_arrived(struct pc_context *context, struct pc_message *message);
/* Its receive, of which the message was taken back, waits again. */
void pc_collect_again(struct pc_receive *receive);
void pc_calls_stop(struct pc_context *context, int status, bool closes);
void pc_calls_forget(struct pc_context *context, int peer, int status);
void pc_calls_free(struct pc_context *context);
/* Give a message that stands nowhere to the caller. 0, or -ENOMEM. */
int pc_message_to_caller(struct pc_engine *engine, struct pc_message *message);
/* Forget a message that its link does not know any more, and that is not here: nobody can receive
   it. The receive that had it, and has nothing now. */
struct pc_receive *pc_message_forget(struct pc_engine *engine, struct pc_message *message);

void pc_receive_end(struct pc_engine *engine, struct pc_receive *receive, int status,
                    const struct pc_message *message);
void pc_send_end(struct pc_engine *engine, struct pc_send *send, int status);

#endif
