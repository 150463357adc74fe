/* Channels as Python sees them. */
#ifndef PC_CHANNEL_TYPE_H
#define PC_CHANNEL_TYPE_H

#include "py.h"

#include "channel.h"

#include <pthread.h>

/* Everything in a channel is done with the interpreter's lock. Who gives that up in the middle of something, to copy or
   to wait, is `away`; another thread that comes meanwhile waits until it is back, and is `wanted`. */
typedef struct {
    PyObject_HEAD
    pc_channel channel;
    PyObject *host;
    PyObject *events; /* what has happened and was not handed over: a list, or NULL */
    bool failed;      /* an event could not be made */
    bool away;
    atomic_int wanted;    /* threads that wait for who is away */
    pthread_mutex_t lock; /* held while away */
    PyThreadState *state; /* of who is away */
} pc_channel_object;

extern PyType_Spec pc_channel_spec;

bool pc_is_channel(PyObject *object);

#endif
