// Package schemas is the contract between the parts of Runbus: the names that cross the bus (tenants, runner ids,
// subjects, credentials) with their grammars, the error codes with their texts, and, in the subpackage runbusv1, the
// protobuf messages. It imports nothing else of this module, and everything else imports it.
package schemas
