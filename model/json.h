/* SPDX-License-Identifier: Apache-2.0 */
/* JSON text into jansson values, with messages that name the file. */
#ifndef ZS_MODEL_JSON_H
#define ZS_MODEL_JSON_H

#include <jansson.h>

#include "zspill.h"

/* jansson does not say so wherever it runs out of memory: a text may then look wrong, and a value
 * lack a key. Whether it did on this thread since zs_json_watch: zs_json_lacks_memory. */
void zs_json_watch(void);
int zs_json_lacks_memory(void);
/* path: what to call the text in messages. Duplicate keys are ZS_ERR_CORRUPT, and so is any
 * top-level value but an object. *out is to be released with json_decref. */
zs_status zs_json_parse(const char *text, size_t bytes, const char *path, json_t **out);
/* max_bytes: larger files are refused unread. */
zs_status zs_json_load(const char *path, uint64_t max_bytes, json_t **out);
/* value as compact JSON in buf for a message, cut with "..." where it is too long; returns buf. */
const char *zs_json_text(const json_t *value, char buf[80]);

#endif
