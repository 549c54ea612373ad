// The modules of the page in one file, which each call of `openPage` imports anew.

export * as alignment from "../../attnmix/page/src/alignment";
export * as attention from "../../attnmix/page/src/attention";
export * as blocks from "../../attnmix/page/src/blocks";
export * as cells from "../../attnmix/page/src/cells";
export * as chosen from "../../attnmix/page/src/chosen";
export * as colours from "../../attnmix/page/src/colours";
export * as compared from "../../attnmix/page/src/compared";
export * as comparison from "../../attnmix/page/src/comparison";
export * as data from "../../attnmix/page/src/data";
export * as effects from "../../attnmix/page/src/effects";
export * as format from "../../attnmix/page/src/format";
export * as margin from "../../attnmix/page/src/margin";
export * as means from "../../attnmix/page/src/means";
export * as measures from "../../attnmix/page/src/measures";
export * as missing from "../../attnmix/page/src/missing";
export * as prediction from "../../attnmix/page/src/prediction";
export * as shares from "../../attnmix/page/src/shares";
export * as state from "../../attnmix/page/src/state";
export * as text from "../../attnmix/page/src/text";
export * as words from "../../attnmix/page/src/words";
