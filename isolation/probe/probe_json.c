#include "probe.h"

#include <string.h>

static void append(struct json *json, const char *text, size_t size)
{
    if (json->full || size >= sizeof(json->text) - json->used) {
        json->full = true;
        return;
    }
    memcpy(json->text + json->used, text, size);
    json->used += size;
    json->text[json->used] = '\0';
}

void json_raw(struct json *json, const char *text)
{
    append(json, text, strlen(text));
}

void json_bytes(struct json *json, const char *text, size_t size)
{
    static const char digits[] = "0123456789abcdef";

    append(json, "\"", 1);
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = (unsigned char)text[i];

        if (byte < 0x20 || byte > 0x7e || byte == '"' || byte == '\\') {
            char escaped[] = {'\\', 'u', '0', '0', digits[byte >> 4], digits[byte & 15]};

            append(json, escaped, sizeof(escaped));
        } else {
            append(json, text + i, 1);
        }
    }
    append(json, "\"", 1);
}

void json_string(struct json *json, const char *text)
{
    if (text == NULL)
        json_raw(json, "null");
    else
        json_bytes(json, text, strlen(text));
}

void json_number(struct json *json, uint64_t number)
{
    char digits[24];
    size_t at = sizeof(digits);

    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number != 0);
    append(json, digits + at, sizeof(digits) - at);
}

void json_next(struct json *json)
{
    char last = json->used == 0 ? '{' : json->text[json->used - 1];

    if (last != '{' && last != '[' && last != ':')
        append(json, ",", 1);
}

void json_name(struct json *json, const char *name)
{
    json_next(json);
    json_string(json, name);
    append(json, ":", 1);
}
