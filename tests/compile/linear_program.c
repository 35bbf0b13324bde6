// Runs the linear kernel in a process of its own: arguments from one file, the output to another.
//
// The input file has ten int64 (bytes of x, weights, bias, output and scratch, the two row strides,
// tokens, depth, panels), then x, weights and bias. Every thread of a team of two runs in turn: the
// kernel's threads do not wait for each other.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void KERNEL(void *x, int64_t ldx, void *out, int64_t ldo, void *w, void *bias, int64_t tokens,
            int64_t depth, int64_t panels, int64_t group, void *epilogue, void *context, int64_t tid,
            int64_t team, void *scratch);

static void *take(int64_t bytes, FILE *from) {
  void *memory = aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (memory && from && fread(memory, 1, bytes, from) != (size_t)bytes)
    exit(3);
  return memory;
}

int main(int count, char **names) {
  enum { X, W, BIAS, OUT, SCRATCH, LDX, LDO, TOKENS, DEPTH, PANELS, WORDS };
  int64_t n[WORDS];
  FILE *in = count == 3 ? fopen(names[1], "rb") : NULL;
  if (!in || fread(n, sizeof *n, WORDS, in) != WORDS)
    return 2;
  void *x = take(n[X], in), *w = take(n[W], in), *bias = take(n[BIAS], in);
  void *out = take(n[OUT], NULL), *scratch = take(n[SCRATCH], NULL);
  if (!x || !w || !bias || !out || !scratch)
    return 4;
  for (int64_t tid = 0; tid < 2; tid++)
    KERNEL(x, n[LDX], out, n[LDO], w, bias, n[TOKENS], n[DEPTH], n[PANELS], 1, NULL, NULL, tid, 2,
           scratch);
  FILE *to = fopen(names[2], "wb");
  if (!to || fwrite(out, 1, n[OUT], to) != (size_t)n[OUT])
    return 5;
  return fclose(to);
}
