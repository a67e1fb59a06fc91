/* What the GPU ran, one line per kernel, copy and fill: "K seconds name", "C bytes", "F bytes".
 * Built against CUPTI's headers, loaded by launch_trace.py beside libcupti. */
#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char *text;
static size_t used, room;

static void say(const char *line) {
  size_t more = strlen(line);
  if (used + more + 1 > room) {
    room = 2 * (used + more + 1);
    text = realloc(text, room);
  }
  memcpy(text + used, line, more + 1);
  used += more;
}

static void CUPTIAPI give(uint8_t **buffer, size_t *size, size_t *most) {
  *size = 1 << 20;
  *buffer = aligned_alloc(8, *size);
  *most = 0;
}

static void CUPTIAPI take(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
  (void)context, (void)stream, (void)size;
  CUpti_Activity *record = NULL;
  char line[4200];
  while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
    switch (record->kind) {
      case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
      case CUPTI_ACTIVITY_KIND_KERNEL: {
        KERNEL_RECORD *kernel = (KERNEL_RECORD *)record;
        snprintf(line, sizeof line, "K %.9f %.4000s\n", (kernel->end - kernel->start) * 1e-9, kernel->name);
        say(line);
        break;
      }
      case CUPTI_ACTIVITY_KIND_MEMCPY:
        snprintf(line, sizeof line, "C %llu\n", (unsigned long long)((COPY_RECORD *)record)->bytes);
        say(line);
        break;
      case CUPTI_ACTIVITY_KIND_MEMSET:
        snprintf(line, sizeof line, "F %llu\n", (unsigned long long)((FILL_RECORD *)record)->bytes);
        say(line);
        break;
      default:
        break;
    }
  }
  free(buffer);
}

static const CUpti_ActivityKind kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                           CUPTI_ACTIVITY_KIND_MEMSET};

/* From now on everything is noted. 0, else CUPTI's number of what went wrong. */
int trace_start(void) {
  CUptiResult error = cuptiActivityRegisterCallbacks(give, take);
  for (size_t i = 0; error == CUPTI_SUCCESS && i < sizeof kinds / sizeof *kinds; i++)
    error = cuptiActivityEnable(kinds[i]);
  return (int)error;
}

/* What was noted since the last call; good until the next one. */
const char *trace_take(void) {
  static char *taken;
  cuptiActivityFlushAll(1);
  free(taken);
  taken = text;
  text = NULL;
  used = room = 0;
  return taken ? taken : "";
}

const char *trace_error(int number) {
  const char *told = "unknown";
  cuptiGetResultString((CUptiResult)number, &told);
  return told;
}
