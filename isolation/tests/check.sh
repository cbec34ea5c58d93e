# What `make check` says of the built files: exactly the table's names are exported, nothing newer than glibc 2.17 is
# asked for, nothing beside libc is needed. OUT, CC, NM, READELF, FLAGS come from the Makefile.
set -eu
cd "$(dirname "$0")/.."
bad=0

complain() {
    echo "$1" >&2
    bad=1
}

names='#include "libfgpu/hooks.h"
#define NAME(library, name, ...) exported:name
#define GATED_NAME(name) exported:name
FGPU_HOOKS(NAME) FGPU_GATED(GATED_NAME)'
table=$(printf '%s\n' "$names" | "$CC" $FLAGS -E -P -x c - | grep -o 'exported:[a-zA-Z0-9_]*' | cut -d: -f2 | sort)
exported=$("$NM" -D --defined-only "$OUT/libfgpu.so" | awk '{print $3}' | sort)
[ "$table" = "$exported" ] || complain "libfgpu.so does not export what is in hooks.h:
$(printf '%s\n%s\n' "$table" "$exported" | sort | uniq -u)"
[ -n "$table" ] || complain "hooks.h has no names"

for file in "$OUT"/libfgpu.so "$OUT"/probe "$OUT"/simulated/*.so.1; do
    [ -e "$file" ] || continue
    newest=$("$READELF" --version-info "$file" | grep -o 'Name: GLIBC_[0-9.]*' | cut -d_ -f2 | sort -V | tail -n 1)
    if [ "$(printf '%s\n2.17\n' "$newest" | sort -V | tail -n 1)" != 2.17 ]; then
        complain "$file needs glibc $newest, newer than 2.17:
$("$NM" -D --undefined-only "$file" | grep -F "@GLIBC_$newest")"
    fi
    needed=$("$READELF" -d "$file" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
    for library in $needed; do
        case "$file:$library" in
        *:libc.so.6 | *:ld-linux*) ;;
        *libfgpu.so:*) complain "$file needs $library" ;;
        *:libdl.so.2 | *:libpthread.so.0 | *:librt.so.1 | *:libm.so.6) ;;
        *) complain "$file needs $library" ;;
        esac
    done
done

if "$READELF" -lW "$OUT/libfgpu.so" | grep -q 'GNU_STACK.*RWE'; then
    complain "libfgpu.so wants an executable stack"
fi
exit $bad
