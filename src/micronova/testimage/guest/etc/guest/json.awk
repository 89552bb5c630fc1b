# Print every value of a JSON document on a line of its own: /path/to/it=value. Values are for printf's %b.
{ text = text $0 "\n" }
END { parse("") }

function blank() { sub(/^[ \t\r\n]+/, "", text) }

function take(pattern,    found) {
    if (!match(text, pattern)) exit 1
    found = substr(text, 1, RLENGTH)
    text = substr(text, RLENGTH + 1)
    return found
}

# Escapes that printf's %b knows stay; the others are resolved, or turned into those.
function string(    raw, out, letter) {
    raw = take("^\"([^\"\\\\]|\\\\.)*\"")
    raw = substr(raw, 2, length(raw) - 2)
    while (match(raw, /\\./)) {
        out = out substr(raw, 1, RSTART - 1)
        letter = substr(raw, RSTART + 1, 1)
        if (letter == "u") {
            out = out bytes(number(substr(raw, RSTART + 2, 4)))
            raw = substr(raw, RSTART + 6)
        } else {
            out = out (letter == "\"" || letter == "/" ? letter : "\\" letter)
            raw = substr(raw, RSTART + 2)
        }
    }
    return out raw
}

function number(digits,    n, value) {
    for (n = 1; n <= length(digits); n++)
        value = value * 16 + index("123456789abcdef", tolower(substr(digits, n, 1)))
    return value
}

function bytes(code) {
    if (code < 128) return octal(code)
    if (code < 2048) return octal(192 + int(code / 64)) octal(128 + code % 64)
    return octal(224 + int(code / 4096)) octal(128 + int(code / 64) % 64) octal(128 + code % 64)
}

function octal(byte) { return sprintf("\\0%o", byte) }

function parse(path,    key, n) {
    blank()
    if (text ~ /^[{]/) {
        take("^[{]")
        for (blank(); text !~ /^[}]/; blank()) {
            key = string()
            blank()
            take("^:")
            parse(path "/" key)
            blank()
            if (text !~ /^[}]/) take("^,")
        }
        take("^[}]")
    } else if (text ~ /^\[/) {
        take("^\\[")
        for (blank(); text !~ /^\]/; blank()) {
            parse(path "/" (n + 0))
            n++
            blank()
            if (text !~ /^\]/) take("^,")
        }
        take("^\\]")
    } else if (text ~ /^"/) {
        print path "=" string()
    } else {
        print path "=" take("^[-+.0-9a-zA-Z]+")
    }
}
