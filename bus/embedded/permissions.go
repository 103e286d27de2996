package embedded

// OpsPermissions are the subjects of the ops user in account OPS, which comes by callout: read-only use of the stock `nats`
// CLI. Allow-lists, nothing else is open to it. Consumers it may make, in OPS alone, since `kv watch` is one.
func OpsPermissions() (publish, subscribe []string) {
	return []string{
			"$JS.API.INFO",
			"$JS.API.STREAM.NAMES", "$JS.API.STREAM.LIST", "$JS.API.STREAM.INFO.*", "$JS.API.STREAM.MSG.GET.*",
			"$JS.API.DIRECT.GET.>",
			"$JS.API.CONSUMER.CREATE.>", "$JS.API.CONSUMER.NAMES.*", "$JS.API.CONSUMER.LIST.*",
			"$JS.API.CONSUMER.INFO.*.*", "$JS.API.CONSUMER.MSG.NEXT.*.*", "$JS.API.CONSUMER.DELETE.*.*",
			"$JS.ACK.>", "$JS.FC.>",
			"$SRV.PING", "$SRV.PING.*", "$SRV.PING.*.*",
			"$SRV.INFO", "$SRV.INFO.*", "$SRV.INFO.*.*",
			"$SRV.STATS", "$SRV.STATS.*", "$SRV.STATS.*.*",
			"runbus.ops.*",
			"$SYS.REQ.USER.INFO",
		}, []string{
			"_INBOX.>",
			"runbus.v1.>",
		}
}

// OpsSysPermissions are the subjects of the ops user in account SYS, which comes by callout: what `nats server list`,
// `ping`, `info` and `report` ask. Allow-lists: no kick, reload, lame duck or profile.
func OpsSysPermissions() (publish, subscribe []string) {
	publish = []string{"$SYS.REQ.USER.INFO", "$SYS.REQ.SERVER.PING", "$SYS.REQ.ACCOUNT.PING.CONNZ", "$SYS.REQ.ACCOUNT.PING.STATZ"}
	for _, call := range []string{"IDZ", "STATSZ", "VARZ", "CONNZ", "ROUTEZ", "GATEWAYZ", "LEAFZ", "SUBSZ", "JSZ", "ACCOUNTZ", "HEALTHZ"} {
		publish = append(publish, "$SYS.REQ.SERVER.*."+call)
	}
	for _, call := range []string{"CONNZ", "LEAFZ", "SUBSZ", "JSZ", "INFO", "CONNS", "STATZ"} {
		publish = append(publish, "$SYS.REQ.ACCOUNT.*."+call)
	}
	return publish, []string{"_INBOX.>"}
}
