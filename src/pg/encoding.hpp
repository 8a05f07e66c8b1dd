// Texts between the database's encoding and UTF-8, which is what goes over the wire.
#pragma once

#include "pg/prelude.hpp"

namespace outbox::pg {

// UTF-8 as text of the database's encoding that every encoding can spell: where that is not UTF-8,
// characters beyond ASCII become '?'. For words of receivers and the operating system; never raises
// for them. NUL-terminated, palloc'd or `utf8` itself.
inline const char* spellable(const char* utf8) {
    if (GetDatabaseEncoding() == PG_UTF8) {
        return utf8;
    }
    char* ascii = pstrdup(utf8);
    for (char* c = ascii; *c != '\0'; ++c) {
        *c = static_cast<unsigned char>(*c) < 0x80 ? *c : '?';
    }
    return ascii;
}

} // namespace outbox::pg
