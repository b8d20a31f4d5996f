// Streams and events without a GPU, for the libraries that stand in for CUDA's: work of one stream runs in its order, streams
// know of each other by events alone, and the host does not wait unless it asks to.
#ifndef RECORDING_STREAMS_H
#define RECORDING_STREAMS_H
#include <stddef.h>
#include <stdint.h>

struct recording_stream;
struct recording_event;

// What a stream is to do. It is copied when it is handed over.
struct recording_work {
  void (*run)(struct recording_work *);
  void *to;
  const void *from;
  size_t bytes;
  int value;
};

// Writes to the file that GPU_CALLS names; if that is a folder, to a file there that the process's number names.
void recording_write(const char *format, ...);

struct recording_stream *recording_stream_new(void);
// Work is run at once where nothing is before it, unless `is_long`: then the stream's own thread runs it.
void recording_submit(struct recording_stream *, struct recording_work, int is_long);
void recording_stream_wait(struct recording_stream *, struct recording_event *);
void recording_stream_synchronise(struct recording_stream *);

struct recording_event *recording_event_new(void);
void recording_event_record(struct recording_event *, struct recording_stream *);
// Whether the work recorded last is done. `waits`: waits for it.
int recording_event_is_done(struct recording_event *, int waits);
struct recording_stream *recording_event_stream(const struct recording_event *);
double recording_event_ms(const struct recording_event *);
void recording_event_free(struct recording_event *);
#endif
