// The tile instructions of AMX, in plain C++. A wrong use of the registers ends the process, as on a CPU if it faults.

#pragma once

#include_next <immintrin.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_shim {

struct Tile {
  int rows = 0, bytes = 0;  // as configured; 0 before
  alignas(64) uint8_t data[16][64];
};

inline thread_local std::array<Tile, 8> tiles;
inline thread_local bool is_configured = false;

inline void require(bool holds, const char* what) {
  if (!holds) {
    std::fprintf(stderr, "AMX: %s\n", what);
    std::abort();
  }
}

inline Tile& configured(int index) {
  Tile& tile = tiles.at(index);
  require(tile.rows > 0 && tile.bytes > 0, "the tile is not configured");
  return tile;
}

inline void load_configuration(const void* operand) {
  require(!is_configured, "the tiles are configured, and were not released");
  is_configured = true;
  const uint8_t* bytes = static_cast<const uint8_t*>(operand);
  require(bytes[0] == 1 && bytes[1] == 0, "the palette is not 1, or the first row is not 0");
  for (int index = 0; index < 8; ++index) {
    uint16_t columns;
    std::memcpy(&columns, bytes + 16 + 2 * index, sizeof(columns));
    const int rows = bytes[48 + index];
    require(columns <= 64 && rows <= 16 && (columns == 0) == (rows == 0), "the size of a tile is invalid");
    tiles[index] = {.rows = rows, .bytes = columns, .data = {}};
  }
}

inline void release() {
  is_configured = false;
  tiles = {};
}

inline void zero(int index) {
  std::memset(configured(index).data, 0, sizeof(Tile::data));
}

inline void load(int index, const void* from, int64_t stride) {
  Tile& tile = configured(index);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(tile.data[row], static_cast<const uint8_t*>(from) + row * stride, tile.bytes);
  }
}

inline void store(int index, void* to, int64_t stride) {
  const Tile& tile = configured(index);
  for (int row = 0; row < tile.rows; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * stride, tile.data[row], tile.bytes);
  }
}

inline float element(const Tile& tile, int row, int index) {  // of bfloat16
  uint16_t upper;
  std::memcpy(&upper, tile.data[row] + 2 * index, sizeof(upper));
  const uint32_t bits = uint32_t{upper} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// C += A · B, where each row of B holds pairs of two rows.
inline void multiply(int c_index, int a_index, int b_index) {
  Tile& c = configured(c_index);
  const Tile &a = configured(a_index), &b = configured(b_index);
  require(c.rows == a.rows && c.bytes == b.bytes && a.bytes == 4 * b.rows, "the sizes of the tiles do not match");
  const int columns = c.bytes / 4;
  for (int row = 0; row < c.rows; ++row) {
    float sums[16];
    std::memcpy(sums, c.data[row], c.bytes);
    for (int index = 0; index < 2 * b.rows; ++index) {
      const float factor = element(a, row, index);
      for (int column = 0; column < columns; ++column) {
        sums[column] += factor * element(b, index / 2, 2 * column + index % 2);
      }
    }
    std::memcpy(c.data[row], sums, c.bytes);
  }
}

}  // namespace amx_shim

#define SEQWARM_AMX_IS_EMULATED

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig ::amx_shim::load_configuration
#define _tile_release ::amx_shim::release
#define _tile_zero ::amx_shim::zero
#define _tile_loadd ::amx_shim::load
#define _tile_stored ::amx_shim::store
#define _tile_dpbf16ps ::amx_shim::multiply
