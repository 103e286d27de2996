package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"unicode/utf8"

	"github.com/urfave/cli/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/org-runink/runbus/bus"
	"github.com/org-runink/runbus/cmd/internal/process"
	"github.com/org-runink/runbus/cp/audit"
)

func decodeCommand() *cli.Command {
	d := command("decode", "translate a message body from standard input to JSON, for `nats sub --translate 'runink decode'`", "",
		[]cli.Flag{&cli.StringFlag{Name: "type", Usage: "message `TYPE` as in the header Runbus-Type (default: found by its shape)"}},
		func(c *cli.Context) error {
			body, err := io.ReadAll(io.LimitReader(os.Stdin, bus.MaxPayload+1))
			if err != nil {
				return err
			}
			text, err := decode(c.String("type"), body)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.App.Writer, text)
			return err
		})
	d.Description = "The nats CLI gives a translator the body alone, not the headers, so the type is found by the shape of the body. What is\nno message of Runbus, JSON for example, comes out as it went in. Packed messages of RUNBUS_AUDIT are unpacked."
	return d
}

// decode is a body as readable text.
func decode(typeName string, body []byte) (string, error) {
	if typeName != "" {
		m, err := bus.DecodeAny(typeName, body)
		if err != nil {
			return "", err
		}
		return message(typeName, m)
	}
	trimmed := bytes.TrimSpace(body)
	if len(trimmed) == 0 {
		return "(empty)", nil
	}
	if text, ok := asJSON(trimmed); ok {
		return text, nil
	}
	if batch, err := audit.Text(body); err == nil { // a packed one
		if text, ok := asJSON(batch); ok {
			return text, nil
		}
	}
	if name, m := bus.Guess(body); m != nil {
		return message(name, m)
	}
	if utf8.Valid(body) {
		return process.Printable(string(body)), nil
	}
	return fmt.Sprintf("(%d bytes that are no message of this version)", len(body)), nil
}

// asJSON is JSON in one line; ok is false for anything else.
func asJSON(b []byte) (text string, ok bool) {
	var compact bytes.Buffer
	if json.Compact(&compact, b) != nil {
		return "", false
	}
	return string(process.EscapeControls(compact.Bytes())), true
}

func message(name string, m proto.Message) (string, error) {
	b, err := protojson.Marshal(m)
	if err != nil {
		return "", err
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, b); err != nil {
		return "", err
	}
	return name + " " + string(process.EscapeControls(compact.Bytes())), nil
}
