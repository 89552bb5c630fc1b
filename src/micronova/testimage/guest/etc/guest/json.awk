# Print every value of a JSON document on a line of its own: /path/to/it=value. Escapes stay, but for \" and \/.
{ text = text $0 "\n" }
END { parse("") }

function blank() { sub(/^[ \t\r\n]+/, "", text) }

function take(pattern,    found) {
    if (!match(text, pattern)) exit 1
    found = substr(text, 1, RLENGTH)
    text = substr(text, RLENGTH + 1)
    return found
}

function string(    raw) {
    raw = take("^\"([^\"\\\\]|\\\\.)*\"")
    raw = substr(raw, 2, length(raw) - 2)
    gsub(/\\"/, "\"", raw)
    gsub(/\\\//, "/", raw)
    return raw
}

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
