/* SPDX-License-Identifier: Apache-2.0 */
#include "base/crc32c.h"

#include "check.h"

typedef uint32_t (*crc_fn)(uint32_t crc, const void *data, size_t bytes);
static const crc_fn variants[] = {zs_crc32c, zs_crc32c_table};

/* One bit at a time, from the definition. */
static uint32_t slow(uint32_t crc, const unsigned char *data, size_t bytes)
{
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    }
    return ~crc;
}

static uint32_t next(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

/* RFC 3720, B.4 */
static void test_known(void **state)
{
    unsigned char buf[32];

    for (size_t v = 0; v < 2; v++) {
        crc_fn crc = variants[v];
        assert_int_equal(crc(0, "123456789", 9), 0xe3069283);
        assert_int_equal(crc(0, "", 0), 0);
        assert_int_equal(crc(0x1234, "", 0), 0x1234);
        memset(buf, 0, sizeof buf);
        assert_int_equal(crc(0, buf, 32), 0x8a9136aa);
        memset(buf, 0xff, sizeof buf);
        assert_int_equal(crc(0, buf, 32), 0x62a8ab43);
        for (unsigned i = 0; i < 32; i++)
            buf[i] = (unsigned char)i;
        assert_int_equal(crc(0, buf, 32), 0x46dd794e);
        for (unsigned i = 0; i < 32; i++)
            buf[i] = (unsigned char)(31 - i);
        assert_int_equal(crc(0, buf, 32), 0x113fdb5c);
    }
}

static void test_variants_agree(void **state)
{
    enum { BYTES = 20000 };
    unsigned char *buf = malloc(BYTES);
    uint32_t seed = 1;

    assert_non_null(buf);
    for (int i = 0; i < BYTES; i++)
        buf[i] = (unsigned char)next(&seed);
    for (size_t bytes = 0; bytes < 300; bytes++)
        for (size_t v = 0; v < 2; v++)
            assert_int_equal(variants[v](7, buf + bytes % 9, bytes),
                             slow(7, buf + bytes % 9, bytes));
    for (int i = 0; i < 500; i++) {
        size_t at = next(&seed) % 64, bytes = next(&seed) % (BYTES - 64);
        uint32_t start = next(&seed) * 331u;
        uint32_t expected = slow(start, buf + at, bytes);
        for (size_t v = 0; v < 2; v++)
            if (variants[v](start, buf + at, bytes) != expected)
                fail_msg("variant %zu differs at offset %zu, %zu bytes, start %u", v, at, bytes,
                         start);
    }
    /* Around the length of the interleaved streams. */
    for (size_t bytes = 3064; bytes < 3081; bytes++)
        assert_int_equal(zs_crc32c(0, buf, bytes), slow(0, buf, bytes));
    free(buf);
}

static void test_pieces(void **state)
{
    unsigned char buf[10000];
    uint32_t seed = 2;

    for (size_t i = 0; i < sizeof buf; i++)
        buf[i] = (unsigned char)next(&seed);
    for (size_t v = 0; v < 2; v++) {
        uint32_t whole = variants[v](0, buf, sizeof buf);
        for (size_t cut = 0; cut <= sizeof buf; cut += 997)
            assert_int_equal(variants[v](variants[v](0, buf, cut), buf + cut, sizeof buf - cut),
                             whole);
        buf[5000] ^= 4;
        assert_int_not_equal(variants[v](0, buf, sizeof buf), whole);
        buf[5000] ^= 4;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_known),
        cmocka_unit_test(test_variants_agree),
        cmocka_unit_test(test_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
