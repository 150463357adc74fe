/* Where in a program a call was made. With the interpreter's lock. */
#ifndef PC_CALL_PLACE_H
#define PC_CALL_PLACE_H

#include <stddef.h>

#define PC_MOST_PLACE_NBYTES 256 /* of its text */

/* Write file and line of the program's innermost frame, as `task.caller` does; returns
   the length. */
size_t pc_call_place(char to[PC_MOST_PLACE_NBYTES]);

#endif
