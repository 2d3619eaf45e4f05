//! What a setup has written, so that it can be undone: a file below `var/lib/foliomem/setup`.

use crate::setup::SetupError;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Where records are.
const FOLDER: &str = "var/lib/foliomem/setup";

/// A file that was written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Written {
    /// Its path below the root.
    path: PathBuf,
    content: String,
}

/// The permissions of the device before they were changed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DeviceBefore {
    pub mode: u32,
    pub gid: u32,
}

/// All that one setup has changed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    #[serde(skip)]
    name: String,
    files: Vec<Written>,
    /// Folders that were made, the outer ones first.
    folders: Vec<PathBuf>,
    /// Whether the group was made.
    pub made_group: bool,
    pub device: Option<DeviceBefore>,
}

impl Written {
    /// Describes a file that is to be written.
    pub fn new(path: impl Into<PathBuf>, content: impl Into<String>) -> Written {
        Written { path: path.into(), content: content.into() }
    }
}

impl Record {
    /// Describes a setup that is to write `files`.
    pub fn new(name: &str, files: Vec<Written>) -> Record {
        Record { name: name.to_owned(), files, folders: Vec::new(), made_group: false, device: None }
    }

    fn path(&self, root: &Path) -> PathBuf {
        root.join(FOLDER).join(format!("{}.json", self.name))
    }

    /// Returns whether this setup has been made.
    pub fn exists(&self, root: &Path) -> bool {
        self.path(root).exists()
    }

    /// Writes the record, then the files.
    pub fn write(&mut self, root: &Path) -> Result<(), SetupError> {
        for file in &self.files {
            let path = root.join(&file.path);
            if path.symlink_metadata().is_ok() {
                return Err(SetupError::Exists(path));
            }
        }
        let wanted: Vec<_> =
            self.files.iter().map(|file| file.path.clone()).chain([Path::new(FOLDER).join("x")]).collect();
        for path in &wanted {
            let mut missing: Vec<_> =
                path.ancestors().skip(1).take_while(|folder| !root.join(folder).exists()).map(Path::to_owned).collect();
            missing.reverse();
            missing.retain(|folder| !self.folders.contains(folder));
            self.folders.extend(missing);
        }
        for folder in &self.folders {
            let path = root.join(folder);
            fs::create_dir(&path).map_err(|error| SetupError::File("make", path, error))?;
        }
        let text = serde_json::to_string_pretty(&self).unwrap_or_default();
        let write = |path: PathBuf, content: &str| {
            fs::write(&path, content).map_err(|error| SetupError::File("write", path, error))
        };
        write(self.path(root), &format!("{text}\n"))?;
        self.files.iter().try_for_each(|file| write(root.join(&file.path), &file.content))
    }

    /// Reads the record of a setup.
    pub fn read(root: &Path, name: &str) -> Result<Record, SetupError> {
        let path = Record::new(name, Vec::new()).path(root);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(SetupError::NothingToUndo(path)),
            Err(error) => return Err(SetupError::File("read", path, error)),
        };
        let record: Record =
            serde_json::from_str(&text).map_err(|error| SetupError::File("read", path, error.into()))?;
        Ok(Record { name: name.to_owned(), ..record })
    }

    /// Removes what was written, and the record. A file that has been changed stays, which is an
    /// error in the end.
    pub fn remove(&self, root: &Path) -> Result<(), SetupError> {
        let mut changed = None;
        let own = Written::new(self.path(root), "");
        for file in &self.files {
            let path = root.join(&file.path);
            match fs::read_to_string(&path) {
                Ok(content) if content == file.content => remove_file(path)?,
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                _ => changed = changed.or(Some(path)),
            }
        }
        remove_file(own.path)?;
        for folder in self.folders.iter().rev() {
            // Another program may have put a file there.
            let _ = fs::remove_dir(root.join(folder));
        }
        changed.map_or(Ok(()), |path| Err(SetupError::Changed(path)))
    }
}

fn remove_file(path: PathBuf) -> Result<(), SetupError> {
    fs::remove_file(&path).map_err(|error| SetupError::File("remove", path, error))
}
