/* Messages that Python sends and receives, one at a time: what the types `Send` and `Receive`
   share. What others call is in engine_type.h.

   An item is what the engine knows; its handle is the Python object. What becomes of an item is put
   into the queue of events, unless the call that does it returns it. The handle must be kept while
   the item is under way: with it the item is given up. */
#ifndef PC_ITEM_H
#define PC_ITEM_H

#include "engine_type.h"

typedef struct {
    PyObject_HEAD
    pc_engine_object *engine;
    struct pc_py_item *item;
} pc_handle;

/* A handle for an item that has none; NULL with an exception. */
PyObject *pc_item_make_handle(PyTypeObject *type, pc_engine_object *engine,
                              struct pc_py_item *item);
void pc_item_handle_dealloc(pc_handle *handle);
/* Their method `take_back` or `drop`. */
PyObject *pc_item_take_back(pc_handle *handle, PyObject *unused);
void pc_item_free(struct pc_py_item *item);
/* What the engine calls at the end of an item's send. */
void pc_item_send_ended(struct pc_send *send);

#endif
