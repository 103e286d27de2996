// Package embedded runs the NATS server of a control-plane replica inside its process: accounts, users and limits from one
// configuration text, JetStream, TLS 1.3, a WebSocket listener. It is the only package that imports nats-server.
package embedded
