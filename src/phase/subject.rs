//! A model under test: its checkpoint as loaded, its tokenizer and prompts, and the HF capture it is judged by.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::bench;
use crate::error::{Error, Result};
use crate::model::config::Coverage;
use crate::model::{
    Checkpoint, Located, Manifest, ModelConfig, Prompt, PromptSet, Tokenizer, chat_template::ChatTemplate, locate, prompts,
};
use crate::reference::{Capture, Identity};
use crate::runner::{NpuRunner, RunnerOptions};
use crate::settings;

/// What is known of a fixture without opening its checkpoint: enough to name its cases.
#[derive(Debug, Clone)]
pub struct Outline {
    pub name: String,
    /// Why its cases cannot run here.
    pub missing: Option<String>,
    pub layers: usize,
    /// Config keys of HF's resolved config.
    pub config_keys: Vec<String>,
    /// Canonical names of the tensors its config implies.
    pub tensors: Vec<String>,
    /// Ids of the captured prompts, in capture order.
    pub prompts: Vec<String>,
    /// Ids of those with layer outputs.
    pub lens: Vec<String>,
    pub rope_positions: Vec<usize>,
    /// Prompts whose expected first text holds for this model.
    pub expects: Vec<String>,
}
