package registry

import (
	"bytes"
	"strings"
	"testing"
)

func TestSealingKeyForm(t *testing.T) {
	for _, k := range []sealingKey{{}, {Session: "s"}, {Key: []byte{1}}, {strings.Repeat("f", 32), bytes.Repeat([]byte{7}, 1216)}} {
		b, err := k.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		var got sealingKey
		if err := got.UnmarshalBinary(b); err != nil || got.Session != k.Session || !bytes.Equal(got.Key, k.Key) {
			t.Errorf("%v became %v, %v", k, got, err)
		}
		if len(b) > 0 {
			b[len(b)-1] ^= 1
			if len(k.Key) > 0 && !bytes.Equal(got.Key, k.Key) {
				t.Error("it keeps what it read")
			}
		}
	}
	if _, err := (sealingKey{Session: strings.Repeat("x", 256)}).MarshalBinary(); err == nil {
		t.Error("a session of 256 bytes was stored")
	}
}

func FuzzSealingKey(f *testing.F) {
	f.Add([]byte{sealingForm, 2, 's', '1', 'k'})
	f.Add([]byte{sealingForm, 200})
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var k sealingKey
		if k.UnmarshalBinary(b) != nil {
			return
		}
		if again, err := k.MarshalBinary(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("%x became %x, %v", b, again, err)
		}
	})
}
