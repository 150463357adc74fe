/* What a list of requests is made of. See gathering.h. */
#include "gathering.h"

static void add(struct pc_gathering *gathering, struct pc_started *listed,
                struct pc_started *started, Py_ssize_t place) {
    Py_INCREF((PyObject *)listed);
    gathering->awaited[gathering->count++] = (struct pc_awaited){listed, started, place, false};
}

/* Add what is waited for in the core: an item itself, or what a persistent one has started. NULL:
   it is not in the core. Else its engine. */
static pc_engine_object *
add_item(struct pc_gathering *gathering, PyObject *item, Py_ssize_t place) {
    PyObject *last = pc_persistent_last(item);
    struct pc_started *started = (struct pc_started *)(last != NULL ? last : item);
    struct pc_request *received, *sent;
    if (!pc_is_started((PyObject *)started))
        return NULL;
    if (gathering->any && started->collected)
        return started->of->engine;
    if (pc_both_parts((PyObject *)started, &received, &sent)) {
        add(gathering, started, (struct pc_started *)received, place);
        add(gathering, (struct pc_started *)sent, (struct pc_started *)sent, PC_NO_PLACE);
    } else {
        add(gathering, started, started, place);
    }
    return started->of->engine;
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

bool pc_awaited_is_held(const struct pc_awaited *awaited) {
    return awaited->started->ops == &pc_request_ops &&
           pc_request_is_held((struct pc_request *)awaited->started);
}

void pc_gathering_let_go(struct pc_gathering *gathering) {
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        Py_DECREF((PyObject *)gathering->awaited[index].listed);
}

void pc_scatter(struct pc_gathering *gathering) {
    for (Py_ssize_t index = 0; index < gathering->count; index++)
        pc_several_remove(&gathering->several, &gathering->awaited[index].started->op);
}
