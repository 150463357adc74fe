/* How a function of the driver begins and ends. */
#ifndef FAKE_CUDA_API_H
#define FAKE_CUDA_API_H

#include "machine.h"

#define API __attribute__((visibility("default")))

#define BEGIN(needs, ...)                                                                          \
    struct call call;                                                                              \
    CUresult refusal = enter(&call, __func__, needs, __VA_ARGS__);                                 \
    if (refusal)                                                                                   \
    return leave(&call, refusal)
#define END(result) return leave(&call, result)
#define REQUIRE(condition, error)                                                                  \
    do {                                                                                           \
        if (!(condition))                                                                          \
            END(error);                                                                            \
    } while (0)
#define STREAM(variable, handle)                                                                   \
    struct stream *variable = find_stream(handle);                                                 \
    REQUIRE(variable, INVALID_HANDLE);                                                             \
    REQUIRE(!variable->context->error, variable->context->error)
#define EVENT(variable, handle)                                                                    \
    struct event *variable = find_event(handle);                                                   \
    REQUIRE(variable, INVALID_HANDLE);                                                             \
    REQUIRE(!variable->context->error, variable->context->error)

#endif
