// All that a target is made of; included inside its namespace and region.
#include "vec-inl.h"
#include "scores-inl.h"
#include "few-inl.h"
#include "riders-inl.h"
#include "observe-inl.h"
#include "attend-inl.h"
#include "gradient-inl.h"
#include "target-inl.h"
