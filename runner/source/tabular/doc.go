// Package tabular turns texts with rows in them (CSV, JSON lines, JSON documents) into Arrow record batches. It serves
// every source that gets such texts (file, http), and holds the one set of rules for types, nulls and misfits.
//
// # Types
//
// Types are inferred from a sample: the first SampleRows rows (10,000 unless set) and 16 MiB at most, or from all rows
// where the source reads them twice. A column is, in this order of attempts:
//
//   - bool: `true` and `false` in any case;
//   - int64: an optional `-` and digits. What has a leading zero (`007`), a `+` or a thousands separator is text;
//   - decimal128(38,0): integers of which one is beyond int64;
//   - float64: integers and decimal fractions, with or without exponent, NaN, Inf, -Inf. Only when no digit is lost: a
//     literal that float64 can't give back digit for digit is text, and so are integers beyond ±2⁵³ among fractions;
//   - date32: `2006-01-02`;
//   - timestamp in UTC: RFC 3339 with a zone, `T` or a space between. The instant is kept, the zone it was written in is not;
//   - timestamp without zone: the same without a zone. Microseconds, or nanoseconds if a value needs them;
//   - text, everything else: times of day, mixed columns, columns without any value.
//
// In JSON, strings are text or dates and timestamps, never numbers; numbers are int64, decimal128(38,0) or float64 as
// above. Objects, arrays and columns of mixed types are JSON text (Arrow's extension type arrow.json), in which a string
// keeps its quotes and a number its digits. null and an absent field are both null.
//
// The types setting fixes the type of a column (text, json, bool, int64, float64, decimal(p,s), date, timestamp,
// timestamptz), allText that of all. A type set to float64 accepts rounding; nothing else is ever changed in silence.
//
// # Misfits
//
// A value behind the sample that does not fit its column, and a field that no sampled row had, end the fetch with an error
// that names the place, the column and the settings that help. unknownFields=notice leaves such fields out and says so in
// a notice.
//
// # Nulls and empty texts in CSV
//
// An unquoted field equal to nullText (empty unless set) is null. A quoted field never is: `""` is the empty text. In a
// column that is not text an empty field, quoted or not, is null.
//
// # Bytes
//
// Texts are UTF-8; a byte order mark is dropped. UTF-16, invalid UTF-8, a NUL byte in CSV, a lone carriage return outside
// quotes, a row of another width than the header, a JSON field twice in an object, an unpaired surrogate and a record
// over 16 MiB are errors with their line. Empty lines are skipped, but in a CSV of one column, where they are a null.
// Lines end in LF or CRLF; inside quotes they are kept as they are.
package tabular
