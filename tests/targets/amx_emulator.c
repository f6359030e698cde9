/* AMX in software, so that kernels with tiles can be tested on machines that have none.

   install() catches the illegal instruction that a tile instruction is there, does what Intel's manual says (volume 2,
   "AMX instruction set reference") on tiles of the calling thread, and goes on behind it. What is not known is handed
   on: the process ends as it would have. Test code: slow, one trap for each instruction. */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, BYTES = 64 };

static _Thread_local uint8_t tiles[TILES][ROWS][BYTES];
static _Thread_local uint16_t row_bytes[TILES];
static _Thread_local uint8_t row_counts[TILES];
static _Thread_local int configured;
static struct sigaction before;
static long executed;

long instructions_executed(void) { return executed; }

static const int registers[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

typedef struct {
  int map, pp, r, x, b, vvvv, length, w; /* of the VEX prefix */
  uint8_t opcode, mod, reg, rm;
  const uint8_t *rest; /* after the ModRM byte */
} Instruction;

static uint64_t value(const ucontext_t *context, int number) {
  return (uint64_t)context->uc_mcontext.gregs[registers[number]];
}

/* Three-byte VEX only: all of AMX is in map 0F38. */
static int decode(const uint8_t *at, Instruction *out) {
  if (at[0] != 0xC4) return 0;
  out->r = !(at[1] & 0x80);
  out->x = !(at[1] & 0x40);
  out->b = !(at[1] & 0x20);
  out->map = at[1] & 0x1F;
  out->w = at[2] >> 7;
  out->vvvv = ~(at[2] >> 3) & 15;
  out->length = at[2] >> 2 & 1;
  out->pp = at[2] & 3;
  out->opcode = at[3];
  out->mod = at[4] >> 6;
  out->reg = at[4] >> 3 & 7;
  out->rm = at[4] & 7;
  out->rest = at + 5;
  return out->map == 2 && !out->length && !out->w;
}

/* The address of a memory operand, and the register that a tile's rows are apart by; moves `rest` behind it. */
static uint64_t address(Instruction *in, const ucontext_t *context, uint64_t *stride) {
  uint64_t base = 0, index = 0;
  *stride = 0;
  int has_base = 1, number = in->rm | in->b << 3;
  if (in->rm == 4) {
    uint8_t sib = *in->rest++;
    int which = (sib >> 3 & 7) | in->x << 3;
    number = (sib & 7) | in->b << 3;
    if (which != 4) index = value(context, which) << (sib >> 6);
    *stride = index;
    has_base = !((sib & 7) == 5 && in->mod == 0);
  } else if (in->rm == 5 && in->mod == 0) { /* relative to the next instruction */
    int32_t offset;
    memcpy(&offset, in->rest, 4);
    in->rest += 4;
    return (uint64_t)in->rest + (int64_t)offset;
  }
  if (has_base) base = value(context, number);
  int64_t offset = 0;
  if (in->mod == 1) offset = (int8_t)*in->rest++;
  if (in->mod == 2 || !has_base) {
    int32_t wide;
    memcpy(&wide, in->rest, 4);
    in->rest += 4;
    offset = wide;
  }
  return base + offset;
}

static void configure(const uint8_t *config) {
  memset(tiles, 0, sizeof tiles);
  configured = config[0] == 1;
  for (int t = 0; t < TILES; t++) {
    memcpy(&row_bytes[t], config + 16 + 2 * t, 2);
    row_counts[t] = config[48 + t];
    if (row_bytes[t] > BYTES || row_counts[t] > ROWS) configured = 0;
  }
}

static void load(int tile, uint64_t from, uint64_t stride) {
  memset(tiles[tile], 0, sizeof tiles[tile]);
  for (int row = 0; row < row_counts[tile]; row++)
    memcpy(tiles[tile][row], (const uint8_t *)(from + row * stride), row_bytes[tile]);
}

static void store(int tile, uint64_t to, uint64_t stride) {
  for (int row = 0; row < row_counts[tile]; row++)
    memcpy((uint8_t *)(to + row * stride), tiles[tile][row], row_bytes[tile]);
}

/* c (M, N) += a (M, K) b (K, N, 4) in bytes, each side signed or not. */
static void dot_bytes(int c, int a, int b, int a_signed, int b_signed) {
  for (int m = 0; m < row_counts[c]; m++)
    for (int k = 0; k < row_bytes[a] / 4; k++)
      for (int n = 0; n < row_bytes[c] / 4; n++) {
        int32_t sum;
        memcpy(&sum, &tiles[c][m][4 * n], 4);
        for (int i = 0; i < 4; i++) {
          uint8_t left = tiles[a][m][4 * k + i], right = tiles[b][k][4 * n + i];
          sum += (a_signed ? (int8_t)left : (int)left) * (b_signed ? (int8_t)right : (int)right);
        }
        memcpy(&tiles[c][m][4 * n], &sum, 4);
      }
}

/* Numbers below 2^-126 are zero to bfloat16 dots. */
static float normal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float widened(const uint8_t *at) {
  uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return normal(x);
}

/* c (M, N) float32 += a (M, K, 2) b (K, N, 2) in bfloat16: sums of first and of second ones, then both. */
static void dot_bf16(int c, int a, int b) {
  for (int m = 0; m < row_counts[c]; m++)
    for (int n = 0; n < row_bytes[c] / 4; n++) {
      float sums[2] = {0, 0}, sum;
      for (int k = 0; k < row_bytes[a] / 4; k++)
        for (int i = 0; i < 2; i++)
          sums[i] = normal(fmaf(widened(&tiles[a][m][4 * k + 2 * i]), widened(&tiles[b][k][4 * n + 2 * i]), sums[i]));
      memcpy(&sum, &tiles[c][m][4 * n], 4);
      sum = normal(sum + normal(sums[0] + sums[1]));
      memcpy(&tiles[c][m][4 * n], &sum, 4);
    }
}

/* Whether the shapes of three different tiles go together; the instruction is illegal where they do not. */
static int match(int c, int a, int b) {
  return c != a && c != b && a != b && row_counts[c] == row_counts[a] && row_bytes[a] == 4 * row_counts[b] &&
         row_bytes[c] == row_bytes[b];
}

/* Runs one instruction; 0 when it is not one of ours, or not allowed as it stands. */
static int run(Instruction *in, const ucontext_t *context) {
  uint64_t stride;
  int tile = in->reg;
  if (in->opcode == 0x49 && in->mod != 3 && in->pp == 0 && in->reg == 0) {
    configure((const uint8_t *)address(in, context, &stride));
    return configured;
  }
  if (in->opcode == 0x49 && in->mod == 3 && in->pp == 0 && in->reg == 0 && in->rm == 0) {
    configured = 0;
    return 1;
  }
  if (!configured) return 0;
  if (in->opcode == 0x49 && in->mod == 3 && in->pp == 3) {
    memset(tiles[tile], 0, sizeof tiles[tile]);
    return 1;
  }
  if (in->opcode == 0x4B && in->mod != 3 && in->rm == 4 && in->pp != 0) {
    uint64_t where = address(in, context, &stride);
    if (in->pp == 2) store(tile, where, stride);
    else load(tile, where, stride);
    return 1;
  }
  if (in->opcode == 0x5C && in->mod == 3 && in->pp == 2) {
    if (!match(tile, in->rm, in->vvvv & 7)) return 0;
    dot_bf16(tile, in->rm, in->vvvv & 7);
    return 1;
  }
  if (in->opcode == 0x5E && in->mod == 3) {
    if (!match(tile, in->rm, in->vvvv & 7)) return 0;
    /* pp: none = u u, 66 = u s, F3 = s u, F2 = s s */
    dot_bytes(tile, in->rm, in->vvvv & 7, in->pp >= 2, in->pp == 1 || in->pp == 3);
    return 1;
  }
  return 0;
}

static void caught(int number, siginfo_t *info, void *opaque) {
  (void)info;
  ucontext_t *context = opaque;
  Instruction in;
  if (decode((const uint8_t *)context->uc_mcontext.gregs[REG_RIP], &in) && run(&in, context)) {
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)in.rest;
    __atomic_fetch_add(&executed, 1, __ATOMIC_RELAXED);
    return;
  }
  sigaction(number, &before, 0);
}

int install(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = caught;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  return sigaction(SIGILL, &action, &before);
}

int uninstall(void) { return sigaction(SIGILL, &before, 0); }
