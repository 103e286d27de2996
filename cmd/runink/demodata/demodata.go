// Package demodata holds the data set of `runink demo`, see PROVENANCE.md.
package demodata

import _ "embed"

// What the data set is.
const (
	Name  = "elements.csv"
	Title = "the chemical elements"
	Rows  = 118 // beside the header
)

// CSV is the file.
//
//go:embed elements.csv
var CSV []byte
