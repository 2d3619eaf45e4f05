// The library of inline_call.h.
#define HERE
#include "inline_call.h"
