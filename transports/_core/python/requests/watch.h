/* A *watch* over the requests of a long list, so that waits for any of them, again and again, need
   not look at all of them each time.

   It is made when a list is looked at whole. The requests refer to it, and those that have ended
   stand in its queue until they are given to a caller. All that is done with the interpreter's
   lock. With the engine's alone, at the end of a request, only who waits is woken.

   Programs change their lists between two calls. So where a request was seen is a hint; the places
   that were given last, and the end of the list, are looked at again for requests that are new; and
   the whole list is looked at after as many calls as it is long, if it is another one, and when
   nothing has ended for as long as that takes. */
#ifndef PC_WATCH_H
#define PC_WATCH_H

#include "messages.h"

/* Longer lists are watched. */
#define PC_FEW_REQUESTS 64

enum pc_watch_took {
    PC_WATCH_FAILED = -1, /* with an exception */
    PC_WATCH_NOTHING,     /* the wait is left to Python */
    PC_WATCH_TOOK,
    PC_WATCH_UNFIT, /* not all are sends and receives of one engine, or another wait has them */
};

/* Wait a slice of time until requests of a list or tuple are done; one, or all that are known to
   be, are the caller's then: a list of (place, request) in the order of the places. */
enum pc_watch_took pc_watch_take(PyObject *listed, PyObject *timeout, bool several,
                                 PyObject **taken);
/* A request has ended, and the engine works on it no more. */
void pc_watch_ended(struct pc_request *request);
/* A request is being freed. */
void pc_watch_leave(struct pc_request *request);
/* With the engine's lock alone: a request ends. */
void pc_watch_wake(struct pc_request *request);

#endif
