// What llama.cpp's clip.cpp makes of an image with a file for a tower: one function, for tests. tools/clip_library.py
// builds it with llama.cpp's sources.
#include <cstring>

#include "clip-impl.h"
#include "clip.h"

// Returns how many numbers were written to `out`, or a negative number. pixels: [height, width, 3] f32, normalized.
extern "C" int encode_image(const char * path, const float * pixels, int width, int height, float * out, int most) {
    clip_context_params parameters = {};
    parameters.flash_attn_type = CLIP_FLASH_ATTN_TYPE_DISABLED;
    parameters.image_min_tokens = parameters.image_max_tokens = -1;
    clip_init_result loaded = clip_init(path, parameters);
    if (!loaded.ctx_v) return -1;
    clip_image_f32 image;
    image.set_size({width, height}, false, false);
    image.cpy_buf(std::vector<float>(pixels, pixels + 3 * width * height));
    std::vector<float> result((size_t) clip_n_output_tokens(loaded.ctx_v, &image) * clip_n_mmproj_embd(loaded.ctx_v));
    const bool done = clip_image_encode(loaded.ctx_v, 1, &image, result);
    clip_free(loaded.ctx_v);
    if (!done || (int) result.size() > most) return -2;
    std::memcpy(out, result.data(), result.size() * sizeof(float));
    return (int) result.size();
}
