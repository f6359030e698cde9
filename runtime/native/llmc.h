/* llmc in an app: opens an artifact of a model that generates text, feeds it tokens, and says what comes next.
 *
 * Every function that can fail returns a status; llmc_last_error() then has one line that says what, where and what to
 * do. No exception leaves the library. A model may be used from several threads: steps wait for one another. A sequence
 * or a text is for one thread at a time.
 */

#ifndef LLMC_H
#define LLMC_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LLMC_API __attribute__((visibility("default")))
#else
#define LLMC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum llmc_status {
  LLMC_OK = 0,
  LLMC_ARTIFACT = 1, /* the artifact is damaged, or not for this machine */
  LLMC_REQUEST = 2,  /* the call asks for what the model cannot give */
  LLMC_FAILED = 3    /* the machine or the model failed: no memory, numbers that are none */
} llmc_status;

/* Why the last call of this thread failed; valid until its next call that fails. */
LLMC_API const char* llmc_last_error(void);

/* --- a model --- */

typedef struct llmc_model llmc_model;

/* Zero is a default everywhere: every core this process may use; one text as long as the model's context, in at most
 * half of the memory; 256. */
typedef struct llmc_options {
  int32_t threads;
  int64_t cache_tokens;  /* tokens that all sequences together have room for */
  int32_t prefill_chunk; /* tokens of a prompt that one step reads at most */
  int32_t keep_mapped;   /* 1: weights stay those of the file. By default they are copied little by little, in pages of
                            2 MB, where these are seen to be faster and twice as much memory is available */
  int32_t always_hash;   /* 1: hash the weights, although they were found intact before. Which were is remembered, for
                            Python's runtime too, in LLMC_CACHE_DIR or llmc/ in XDG_CACHE_HOME or ~/.cache */
} llmc_options;

/* Open an artifact: everything in it is checked before anything of it is loaded, weights the first time. `options` may
 * be NULL. The first call of a process sets TVM_NUM_THREADS and TVM_BIND_THREADS in its environment. */
LLMC_API llmc_status llmc_open(const char* folder, const llmc_options* options, llmc_model** model);

/* Sequences and texts of the model live on until they are closed themselves. NULL is allowed, as in all _close. */
LLMC_API void llmc_close(llmc_model* model);

LLMC_API const char* llmc_name(const llmc_model* model);
LLMC_API int32_t llmc_vocab(const llmc_model* model);
LLMC_API int32_t llmc_context(const llmc_model* model);

/* Whether an id ends an answer. */
LLMC_API int llmc_is_end(const llmc_model* model, int32_t id);

/* Pages of 16 tokens that no sequence holds. */
LLMC_API int64_t llmc_free_pages(const llmc_model* model);

/* --- text --- */

/* Ids of a text of `bytes` bytes of UTF-8, after the model's first token where it wants one. `count` is how many there
 * are; at most `capacity` of them are written. Byte-level BPE only: LLMC_REQUEST names what else there is. */
LLMC_API llmc_status llmc_encode(const llmc_model* model, const char* text, size_t bytes, int32_t* ids, size_t capacity,
                                 size_t* count);

/* Turns ids into text one by one. Pieces are UTF-8 without a zero at the end, valid until the next call on the text; a
 * character comes whole or not at all. */
typedef struct llmc_text llmc_text;
LLMC_API llmc_status llmc_text_open(const llmc_model* model, llmc_text** text);
LLMC_API void llmc_text_close(llmc_text* text);
LLMC_API llmc_status llmc_text_push(llmc_text* text, int32_t id, const char** piece, size_t* bytes);
LLMC_API llmc_status llmc_text_finish(llmc_text* text, const char** piece, size_t* bytes);

/* --- sequences --- */

/* Tokens whose keys and values are in the model's cache. It takes pages as it grows. */
typedef struct llmc_sequence llmc_sequence;
LLMC_API llmc_status llmc_sequence_open(llmc_model* model, llmc_sequence** sequence);
LLMC_API void llmc_sequence_close(llmc_sequence* sequence);
LLMC_API int32_t llmc_length(const llmc_sequence* sequence);

/* Append tokens, such as a prompt, in steps of at most prefill_chunk. After an error the chunks that were done stay. */
LLMC_API llmc_status llmc_feed(llmc_sequence* sequence, const int32_t* ids, size_t count);

/* Append one token to each of several sequences of one model, in one step: all of them or, after an error, none. */
LLMC_API llmc_status llmc_step(llmc_sequence* const* sequences, const int32_t* ids, size_t count);

/* The likeliest token after the last one. */
LLMC_API llmc_status llmc_best(const llmc_sequence* sequence, int32_t* id);

/* For an app that chooses itself: the likeliest ids, best first, their logits, and the logarithm of the sum of exp of
 * all logits. At most `capacity` are written and `count` says how many; a model gives 64, or its whole vocabulary. */
LLMC_API llmc_status llmc_candidates(const llmc_sequence* sequence, int32_t* ids, float* logits, size_t capacity,
                                     size_t* count, float* normalizer);

/* Logits of the whole vocabulary, valid until the sequence is fed or closed. */
LLMC_API llmc_status llmc_logits(const llmc_sequence* sequence, const float** logits);

/* --- all of it in one call --- */

typedef enum llmc_finish {
  LLMC_FINISH_STOP = 0,    /* an end token */
  LLMC_FINISH_LENGTH = 1,  /* max_tokens */
  LLMC_FINISH_CONTEXT = 2, /* the model's context, or the cache, is full */
  LLMC_FINISH_CALLER = 3   /* on_token wanted no more */
} llmc_finish;

/* Called for each token that is made, with the text that is certain now; anything but 0 ends the answer. */
typedef int (*llmc_on_token)(void* user, int32_t id, const char* piece, size_t bytes);

/* Continue a prompt greedily. `finish` may be NULL. */
LLMC_API llmc_status llmc_generate(llmc_model* model, const int32_t* ids, size_t count, int32_t max_tokens,
                                   llmc_on_token on_token, void* user, llmc_finish* finish);

#ifdef __cplusplus
}
#endif

#endif
