package embedded

// OpsPermissions are the subjects of the ops user in account OPS, which comes by callout: read-only use of the stock `nats`
// CLI (tried with v0.5.0: sub, kv ls/get/watch/history, stream ls/info/get/report, micro ls/info/stats, account info).
// Allow-lists, nothing else is open to it. It may make consumers, since `kv watch` is one, but in OPS alone.
func OpsPermissions() (publish, subscribe []string) {
	return []string{
			"$JS.API.INFO",
			"$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET.*",
			"$JS.API.DIRECT.GET.>",
			"$JS.API.CONSUMER.CREATE.>", "$JS.API.CONSUMER.NAMES.*", "$JS.API.CONSUMER.LIST.*",
			"$JS.API.CONSUMER.INFO.*.*", "$JS.API.CONSUMER.MSG.NEXT.*.*", "$JS.API.CONSUMER.DELETE.*.*",
			"$JS.ACK.>", "$JS.FC.>", // without flow control an ordered consumer stalls on a large bucket
			"$SRV.PING", "$SRV.PING.*", "$SRV.PING.*.*",
			"$SRV.INFO", "$SRV.INFO.*", "$SRV.INFO.*.*",
			"$SRV.STATS", "$SRV.STATS.*", "$SRV.STATS.*.*",
			"runbus.ops.*", // endpoints of the micro service
			"$SYS.REQ.USER.INFO",
		}, []string{
			"_INBOX.>",
			"runbus.v1.>",
		}
}

// OpsSysPermissions are the subjects of the ops user in account SYS, which comes by callout: what `nats server list`,
// `ping`, `info` and `report` ask (tried with v0.5.0). Allow-lists: no kick, reload, lame duck or profile, and no
// subscription but its inbox.
func OpsSysPermissions() (publish, subscribe []string) {
	publish = []string{"$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.PING"}
	for _, call := range []string{"VARZ", "STATSZ", "CONNZ", "ROUTEZ", "GATEWAYZ", "LEAFZ", "JSZ", "ACCOUNTZ", "HEALTHZ"} {
		publish = append(publish, "$SYS.REQ.SERVER.*."+call) // `*` is PING or a server's id
	}
	return publish, []string{"_INBOX.>"}
}
