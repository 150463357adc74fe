/* What a list of requests is made of. See gathering.h. */
#include "gathering.h"

#include "python/collectives/collective.h"

static void add(struct pc_gathering *gathering, PyObject *object, struct pc_request *request,
                struct pc_op *op, char *collected, Py_ssize_t place) {
    if (!gathering->any || !*collected)
        gathering->awaited[gathering->count++] =
            (struct pc_awaited){Py_NewRef(object), request, op, collected, place, false};
}

/* Add what is waited for in the core: an item itself, or what a persistent one has started. NULL:
   it is not in the core. Else its engine. */
static pc_engine_object *
add_item(struct pc_gathering *gathering, PyObject *item, Py_ssize_t place) {
    PyObject *started = pc_persistent_last(item), *object = started != NULL ? started : item;
    struct pc_request *received, *sent;
    pc_engine_object *engine;
    if (PyObject_TypeCheck(object, pc_request_type)) {
        struct pc_request *request = (struct pc_request *)object;
        add(gathering, object, request, &request->op, &request->collected, place);
        return request->messages->engine;
    }
    if (pc_both_parts(object, &received, &sent)) {
        char *collected = pc_both_collected(object);
        add(gathering, object, received, &received->op, collected, place);
        add(gathering, (PyObject *)sent, sent, &sent->op, collected, PC_NO_PLACE);
        return received->messages->engine;
    }
    if (!pc_is_collective(object))
        return NULL;
    struct pc_op *op = pc_collective_op(object, &engine);
    add(gathering, object, NULL, op, &((struct pc_started *)object)->collected, place);
    return engine;
}

bool pc_gather(struct pc_gathering *gathering) {
    Py_ssize_t count = PyList_Size(gathering->listed);
    for (Py_ssize_t place = 0; place < count; place++) {
        pc_engine_object *engine =
            add_item(gathering, PyList_GetItem(gathering->listed, place), place);
        if (engine == NULL || (gathering->engine != NULL && gathering->engine != engine))
            return false;
        gathering->engine = engine;
    }
    return gathering->count > 0;
}

bool pc_awaited_is_done(const struct pc_awaited *awaited) {
    return awaited->request != NULL ? pc_request_is_done(awaited->request)
                                    : pc_op_is_done(awaited->op);
}

bool pc_awaited_is_well(const struct pc_awaited *awaited) {
    return awaited->request != NULL ? awaited->request->status == 0
                                    : pc_op_is_done(awaited->op) && awaited->op->status == 0;
}

void pc_gathering_let_go(struct pc_gathering *gathering) {
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        Py_DECREF(gathering->awaited[index].object);
}

void pc_scatter(pc_engine_object *engine, void *argument) {
    struct pc_gathering *gathering = argument;
    (void)engine;
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        pc_several_remove(&gathering->several, gathering->awaited[index].op);
}
