/* `_core.wait_all` and `_core.take`: waiting for several requests of one engine at once. */
#include "gathering.h"
#include "watch.h"

#include <stdlib.h>

/* With the lock. */
static void gather(struct pc_gathering *gathering) {
    uint32_t left = 0;
    bool is_new = false; /* one has ended since it was looked at */
    gathering->is_taken = gathering->is_held = false;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_op *op = &gathering->awaited[index].started->op;
        gathering->is_held |= pc_awaited_is_held(&gathering->awaited[index]);
        if (pc_op_is_done(op)) {
            is_new |= !gathering->awaited[index].was_done;
            continue;
        }
        if (pc_several_add(&gathering->several, op))
            left++;
        else
            gathering->is_taken = true;
    }
    if (gathering->any && left > 0)
        left = is_new ? 0 : 1;
    atomic_store_explicit(&gathering->several.left, left, memory_order_relaxed);
}

/* Whether a request was done when it was looked at, and whether it, or a part of it, had failed;
   returns where the next one begins. */
static Py_ssize_t next(const struct pc_gathering *gathering, Py_ssize_t index, bool *done,
                       bool *failed) {
    *done = true, *failed = false;
    do {
        const struct pc_awaited *awaited = &gathering->awaited[index++];
        *done &= awaited->was_done;
        *failed |= awaited->was_done && !pc_awaited_is_well(awaited);
    } while (index < gathering->count && gathering->awaited[index].place == PC_NO_PLACE);
    return index;
}

/* Whether all are done, or any; those that hold a message are gone on with. -1 with an
   exception. */
static int are_done(struct pc_gathering *gathering) {
    bool every = true, any = false, done, failed;
    gathering->engine->looked += (uint64_t)gathering->count;
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_started *started = gathering->awaited[index].started;
        if (started->ops->go_on != NULL && started->ops->go_on(started) < 0)
            return -1;
    }
    for (Py_ssize_t index = 0; index < gathering->count; index++) {
        struct pc_started *started = gathering->awaited[index].started;
        gathering->awaited[index].was_done = started->ops->is_done(started);
    }
    for (Py_ssize_t index = 0; index < gathering->count;) {
        index = next(gathering, index, &done, &failed);
        every &= done;
        any |= done || failed;
    }
    return gathering->any ? any : every;
}

/* Wait a slice of time. 1: all are done, or any; 0: not yet; -1 with an exception. */
static int await(struct pc_gathering *gathering, uint64_t until_ns) {
    int done;
    struct pc_turn turn;
    while ((done = are_done(gathering)) == 0) {
        if (!pc_engine_take(gathering->engine, &turn))
            return 0;
        gather(gathering);
        pc_engine_give(gathering->engine, &turn);
        if (!gathering->is_taken && !gathering->is_held &&
            !pc_several_is_done(&gathering->several)) {
            PyThreadState *state = PyEval_SaveThread();
            pc_drive_wait(&gathering->engine->drive, NULL, &gathering->several, until_ns,
                          PC_FOR_EVER);
            PyEval_RestoreThread(state);
        }
        bool is_over =
            !gathering->is_taken && (gathering->is_held || pc_several_is_done(&gathering->several));
        if ((gathering->any || !pc_several_is_done(&gathering->several)) &&
            pc_engine_take(gathering->engine, &turn)) {
            pc_scatter(gathering);
            pc_engine_give(gathering->engine, &turn);
        }
        pc_engine_let_go(gathering->engine);
        if (!is_over)
            return are_done(gathering);
    }
    return done;
}

/* How long to wait: the time given, or else the default of the first request. */
static bool has_deadline(const struct pc_gathering *gathering, PyObject *seconds,
                         uint64_t *timeout_ns) {
    return pc_timeout(seconds, gathering->awaited[0].started->of->context->op_timeout_ns,
                      timeout_ns);
}

#define FEW 64

/* Begin to wait for what is listed. `gathering` has room for few. -1 with an exception; 0: it is
   left to Python; 1: so many nanoseconds at most. `end` must follow. */
static int begin(struct pc_gathering *gathering, PyObject *listed, PyObject *seconds,
                 uint64_t *timeout_ns) {
    gathering->listed = listed;
    if (!PyList_CheckExact(listed))
        return 0;
    size_t most = (size_t)PyList_Size(listed) * 2;
    struct pc_awaited *many = most > FEW ? malloc(most * sizeof *many) : gathering->awaited;
    if (many == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    gathering->awaited = many;
    return pc_gather(gathering) && !gathering->engine->python_busy &&
           has_deadline(gathering, seconds, timeout_ns);
}

static void end(struct pc_gathering *gathering, const struct pc_awaited *few) {
    pc_gathering_let_go(gathering);
    if (gathering->awaited != few)
        free(gathering->awaited);
}

/* The results of all; NULL with an exception. */
static PyObject *results_of(const struct pc_gathering *gathering) {
    const struct pc_awaited *last = &gathering->awaited[gathering->count - 1];
    Py_ssize_t place = last->place == PC_NO_PLACE ? last[-1].place : last->place;
    PyObject *results = PyList_New(place + 1);
    for (Py_ssize_t index = 0; results != NULL && index < gathering->count; index++) {
        const struct pc_awaited *awaited = &gathering->awaited[index];
        if (awaited->place == PC_NO_PLACE)
            continue;
        PyObject *result = awaited->listed->ops->result(awaited->listed);
        if (result != NULL)
            PyList_SetItem(results, awaited->place, result);
        else
            Py_CLEAR(results);
    }
    return results;
}

PyObject *pc_wait_all(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    struct pc_awaited few[FEW];
    struct pc_gathering gathering = {.awaited = few};
    uint64_t timeout_ns;
    if (num_args != 2) {
        PyErr_SetString(PyExc_TypeError, "arguments are list, timeout");
        return NULL;
    }
    int status = begin(&gathering, args[0], args[1], &timeout_ns);
    if (status > 0)
        status = await(&gathering, pc_patience(timeout_ns).until_ns);
    for (Py_ssize_t index = 0; status > 0 && index < gathering.count; index++)
        status = pc_awaited_is_well(&gathering.awaited[index]);
    PyObject *results = status > 0    ? results_of(&gathering)
                        : status == 0 ? Py_NewRef(Py_None)
                                      : NULL;
    end(&gathering, few);
    return results;
}

/* Take one that is done, or all; of all, one that has failed only if it is alone. Pairs of place
   and request; NULL with an exception. */
static PyObject *take(const struct pc_gathering *gathering, bool several) {
    PyObject *taken = PyList_New(0);
    for (int turn = 0; turn < 1 + several && taken != NULL && PyList_Size(taken) == 0; turn++) {
        bool takes_all = several && turn == 0, done, failed;
        for (Py_ssize_t index = 0, after; index < gathering->count; index = after) {
            const struct pc_awaited *awaited = &gathering->awaited[index];
            after = next(gathering, index, &done, &failed);
            if (!done || (failed && takes_all) || awaited->listed->collected)
                continue;
            awaited->listed->collected = 1; /* another thread may come while the pair is made */
            PyObject *pair = Py_BuildValue("nO", awaited->place, awaited->listed);
            if (pair == NULL || PyList_Append(taken, pair) < 0)
                Py_CLEAR(taken);
            Py_XDECREF(pair);
            if (!takes_all || taken == NULL)
                break;
        }
    }
    return taken;
}

/* Take what is done of a list that is not watched. NULL: nothing, and perhaps an exception. */
static PyObject *take_gathered(PyObject *given, PyObject *seconds, bool several) {
    PyObject *listed = PySequence_List(given);
    struct pc_awaited few[FEW];
    struct pc_gathering gathering = {.awaited = few, .any = true};
    uint64_t timeout_ns;
    if (listed == NULL)
        return NULL;
    int status = begin(&gathering, listed, seconds, &timeout_ns);
    if (status > 0)
        status = await(&gathering, pc_patience(timeout_ns).until_ns);
    PyObject *taken = status > 0 ? take(&gathering, several) : NULL;
    if (taken != NULL && PyList_Size(taken) == 0)
        Py_CLEAR(taken); /* others have been quicker, or a part of one has failed */
    end(&gathering, few);
    Py_DECREF(listed);
    return taken;
}

PyObject *pc_take(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t num_args) {
    if (num_args != 3) {
        PyErr_SetString(PyExc_TypeError, "arguments are requests, timeout, several");
        return NULL;
    }
    PyObject *taken = NULL;
    bool several = args[2] == Py_True;
    if (!PyList_CheckExact(args[0]) && !PyTuple_CheckExact(args[0]))
        Py_RETURN_NONE;
    enum pc_watch_took took = pc_watch_take(args[0], args[1], several, &taken);
    if (took == PC_WATCH_UNFIT)
        taken = take_gathered(args[0], args[1], several);
    return taken != NULL || PyErr_Occurred() ? taken : Py_NewRef(Py_None);
}

PyObject *pc_claim_request(PyObject *Py_UNUSED(module), PyObject *object) {
    if (!pc_is_started(object))
        Py_RETURN_NONE;
    struct pc_started *started = (struct pc_started *)object;
    bool is_mine = !started->collected;
    started->collected = 1;
    return PyBool_FromLong(is_mine);
}
