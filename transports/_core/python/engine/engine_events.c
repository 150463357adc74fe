/* What an engine tells Python: a queue of events, which `MessageEngine.events` empties. See
   engine_type.h. */
#include "engine_type.h"

void pc_engine_post(pc_engine_object *self, struct pc_event *event) {
    if (event->stands)
        return;
    event->stands = true;
    event->next = NULL;
    pc_engine_set(self->last, event);
    self->last = &event->next;
    pc_drive_post_work(&self->drive);
}

void pc_engine_unpost(pc_engine_object *self, struct pc_event *event) {
    struct pc_event **at = &self->first;
    if (!event->stands)
        return;
    while (*at != event)
        at = &(*at)->next;
    pc_engine_set(at, event->next);
    if (*at == NULL)
        self->last = at;
    event->stands = false;
}

/* What one event was when it was taken out of the queue. */
struct taken {
    struct pc_event *event;
    enum pc_event_kind kind;
    int peer, status;
    char why[sizeof((struct pc_peer_events *)NULL)->why];
};

/* With the lock. False: there is none. */
static bool take_event(pc_engine_object *self, struct taken *taken) {
    struct pc_event *event;
    while ((event = self->first) != NULL) {
        pc_engine_set(&self->first, event->next);
        if (self->first == NULL)
            self->last = &self->first;
        event->stands = false;
        taken->kind = event->kind;
        if (event->kind <= PC_EVENT_ENDED) {
            if (!pc_item_taken((struct pc_py_item *)event))
                continue;
            ((struct pc_py_item *)event)->is_reporting = true;
            taken->status = ((struct pc_py_item *)event)->status;
        } else if (event->kind == PC_EVENT_STARTED) {
            pc_started_event_taken(event);
        } else if (event->kind >= PC_EVENT_FINISHED && event != &self->watched) {
            taken->peer = 0;
            while (event < &self->peers[taken->peer].finished ||
                   event > &self->peers[taken->peer].wanted)
                taken->peer++;
            memcpy(taken->why, self->peers[taken->peer].why, sizeof taken->why);
        }
        taken->event = event;
        return true;
    }
    return false;
}

PyObject *pc_engine_events_py(pc_engine_object *self, PyObject *Py_UNUSED(unused)) {
    PyObject *events = PyList_New(0);
    pc_engine_let_go(self);
    pc_drive_take_work(&self->drive);
    struct taken taken;
    struct pc_turn turn;
    while (events != NULL && pc_engine_take(self, &turn)) {
        bool is_any = take_event(self, &taken);
        pc_engine_give(self, &turn);
        if (!is_any)
            break;
        PyObject *event = NULL;
        switch (taken.kind) {
        case PC_EVENT_ARRIVED:
        case PC_EVENT_HELD:
        case PC_EVENT_ENDED:
            if (!pc_item_event(self, (struct pc_py_item *)taken.event, taken.kind, taken.status,
                               &event))
                continue;
            break;
        case PC_EVENT_STARTED:
            event = pc_started_event(self, taken.event);
            break;
        case PC_EVENT_COMPOSED:
            event = pc_composed_event(taken.event);
            break;
        case PC_EVENT_SEVERAL:
            event = pc_several_event(taken.event);
            break;
        case PC_EVENT_ASKED:
            event = pc_composed_asks(taken.event);
            break;
        case PC_EVENT_FINISHED:
        case PC_EVENT_WANTED:
            event = Py_BuildValue("ii", taken.kind, taken.peer);
            break;
        case PC_EVENT_LOST:
            /* It may have been cut in the middle of a character. */
            event = Py_BuildValue(
                "iiN", taken.kind, taken.peer,
                PyUnicode_DecodeUTF8(taken.why, (Py_ssize_t)strlen(taken.why), "replace"));
            break;
        case PC_EVENT_WATCHED:
            event = Py_BuildValue("(i)", taken.kind);
        }
        if (event == NULL || PyList_Append(events, event) < 0)
            Py_CLEAR(events);
        Py_XDECREF(event);
    }
    return events;
}
